"""Models as ONNX files, for inference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn import __version__
from pydtnn.interchange.onnx.operators import WRITERS, Draft, Place
from pydtnn.interchange.orders import feature_orders, known, shapes_by_name
from pydtnn.interchange.slots import slots_of
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.layers import Embedding
from pydtnn.utils.files import write_file
from pydtnn.utils.imports import import_optional

if TYPE_CHECKING:
    from pydtnn.model import Model

WHO = "export_onnx"

OPSET = 17
"""Version of the operators, which files contain."""

IR_VERSION = 8
"""Version of the file format that belongs to the operators."""

MAX_FILE_B = 2**31 - 1
"""B of a file, which is one message of protocol buffers."""


def export_onnx(model: Model, path: str | Path) -> None:
    """Write a model for inference as an ONNX file of opset 17.

    Inputs and outputs are named after the model's; batches may have any size. Images are
    ``(N, C, H, W)``, as users of ONNX expect, and normalised: pixels have to be normalised outside.
    Outputs that are features have the order of the model's.
    Numbers are float64 for a float64 model and float32 otherwise; tokens of an `Embedding` are
    int64, and sequences have the length of the model's.

    With several ranks, call it on one of them; a model that is cut over ranks is exported after
    loading it on one rank.

    Parameters
    ----------
    model : Model
    path : str or Path
        Usually ends in ".onnx"; replaced atomically.

    Raises
    ------
    OSError
        If the file cannot be written; an existing file is not changed.
    ImportError
        If onnx is not installed.
    ValueError
        If a layer cannot be exported, or the file would be larger than 2 GiB.
    """
    data = _to_onnx(model).SerializeToString()
    write_file(WHO, path, data)


def _to_onnx(model: Model) -> Any:
    """Return the message ModelProto of ONNX."""
    description = model.description
    if model.whole.distributed:
        raise ValueError(
            f"{WHO}: expected a model that is not cut over ranks; save it with Trainer.save and "
            "load it on one rank"
        )
    dtype = arithmetic(model.dtype)
    if model.whole.size * dtype.itemsize > MAX_FILE_B:
        raise ValueError(f"{WHO}: expected parameters of less than 2 GiB, got more")
    draft = Draft(WHO, dtype)
    shapes, orders = shapes_by_name(description), feature_orders(description)
    arrays: dict[str, dict[str, np.ndarray]] = {}
    state = model.state()
    try:
        for slot in slots_of(model):
            own = slot.to_theirs(state[slot.name])
            arrays.setdefault(slot.layer, {})[slot.what] = own
        first = {part.name: part for part in description.parts}
        for part in description.parts:
            made = first[part.same_as or part.name].layer
            if made.kind not in WRITERS:
                raise ValueError(
                    f"{part.name}: {made.kind.__name__} cannot be exported; expected one of "
                    f"{', '.join(sorted(kind.__name__ for kind in WRITERS))}"
                )
            place = Place(
                part.name,
                made.kind(*made.args, **made.keywords),
                part.same_as or part.name,
                [*part.inputs],
                [shapes[name] for name in part.inputs],
                part.shape,
                arrays.get(part.same_as or part.name, {}),
                any(orders[name] is not None for name in part.inputs),
            )
            WRITERS[made.kind](draft, place)
        for name in description.outputs:
            order = known(orders[name], f"output {name}") if len(shapes[name]) == 1 else None
            if order is not None:
                draft.reorder(name, order)
    except ValueError as error:
        raise ValueError(f"{WHO}: {error}") from error
    return _message(draft, model)


def _message(draft: Draft, model: Model) -> Any:
    onnx = import_optional("onnx", "onnx", WHO)
    description, helper = model.description, draft.helper
    shapes = shapes_by_name(description)
    others = {
        name
        for part in description.parts
        for name in part.inputs
        if not issubclass(part.layer.kind, Embedding)
    }
    tokens = {name for name, _ in description.inputs} - others
    graph = helper.make_graph(
        draft.nodes,
        "pydtnn",
        [
            draft.value(name, shape, "int64" if name in tokens else None)
            for name, shape in description.inputs
        ],
        [draft.value(name, shapes[name]) for name in description.outputs],
        draft.constants,
    )
    message = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="pydtnn",
        producer_version=__version__,
        doc_string=f"For inference, opset {OPSET}. Images are N, C, H, W, and normalised.",
    )
    helper.set_model_props(message, {"opset": str(OPSET), "layout": "NCHW"})
    onnx.checker.check_model(message)
    return message
