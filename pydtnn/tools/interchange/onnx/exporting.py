"""Models as ONNX files, for inference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.kernels.dtypes import arithmetic
from pydtnn.layers import Embedding
from pydtnn.tools.interchange.onnx.operators import WRITERS, OnnxDraft, Place
from pydtnn.tools.interchange.orders import feature_orders, find_signals, shapes_by_name
from pydtnn.tools.interchange.slots import slots_of
from pydtnn.utils.files import write_file
from pydtnn.utils.imports import import_optional
from pydtnn.utils.validate import check_bool
from pydtnn.utils.version import __version__

if TYPE_CHECKING:
    from pydtnn.model import Model

WHO = "export_onnx"

OPSET = 17
"""Version of the operators, which files contain."""

IR_VERSION = 8
"""Version of the file format that belongs to the operators."""

MAX_FILE_B = 2**31 - 1
"""B of a file, which is one message of protocol buffers."""


def export_onnx(model: Model, path: str | Path, *, normalize: bool = False) -> None:
    """Write a model for inference as an ONNX file of opset 17.

    Inputs and outputs are named after the model's; batches may have any size. Images are
    ``(N, C, H, W)``, as users of ONNX expect. They are normalised, or raw with `normalize`; the
    metadata of the file tell which, with the mean and deviation of each channel for raw samples.
    Outputs that are features have the order of the model's; the `Flatten` of an image, whose order
    is another one in ONNX, must not be the end. Numbers are float64 for a float64 model and float32
    otherwise: the file of a bfloat16 or float16 model does not round activations, so
    that its outputs differ from those of the model by the rounding of 16 bits. Tokens of an
    `Embedding` are int64, and sequences have the length of the model's.

    With several ranks, call it on one of them; a model that is cut over ranks is exported after
    loading it on one rank.

    Parameters
    ----------
    model : Model
    path : str or Path
        Usually ends in ".onnx"; replaced atomically.
    normalize : bool
        Whether the graph starts with ``(x - mean) / std``, so that the inputs are raw samples, such
        as pixels from 0 to 255 (as float32). The statistics are those of the training set, which
        models that `Trainer.save` has written know (`Model.inputs`).

    Raises
    ------
    OSError
        If the file cannot be written; an existing file is not changed.
    ImportError
        If onnx is not installed.
    ValueError
        If a layer cannot be exported, the file would be larger than 2 GiB, or statistics are
        required and not known.
    """
    check_bool(WHO, "normalize", normalize)
    data = _to_onnx(model, normalize).SerializeToString()
    write_file(WHO, path, data)


def statistics_of(model: Model) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return mean and deviation of raw samples, per channel, by the name of an input.

    Inputs that were not normalised in training, such as tokens, have none.
    """
    names = [name for name, _ in model.description.inputs]
    found = {}
    for name, samples in zip(names, model.inputs.parts if model.inputs else (), strict=False):
        if samples.statistics is not None:
            unit = 255 if samples.pixels else 1  # statistics are those of pixels from 0 to 1
            found[name] = unit * samples.statistics.mean, unit * samples.statistics.std
    return found


def _add_normalization(draft: OnnxDraft, model: Model) -> None:
    """Let the graph start with ``(x - mean) / std`` of each input that has statistics."""
    statistics = statistics_of(model)
    if not statistics:
        raise ValueError(
            "normalize=True requires the mean and deviation of the training set, which this model "
            "does not know; save it with Trainer.save and load it, or omit the option"
        )
    nodes, draft.nodes = draft.nodes, []
    for name, shape in model.description.inputs:
        if name not in statistics:
            continue
        last = f"{name}.normalized"
        if name in model.description.outputs:
            raise ValueError(f"{name} is an output too, and cannot be normalised; omit the option")
        for node in nodes:
            node.input[:] = [last if given == name else given for given in node.input]
        sizes = (-1, *[1] * (len(shape) - 1)) if len(shape) >= 3 else (-1,)
        mean, std = (each.reshape(sizes) for each in statistics[name])
        centred = draft.node("Sub", [name, draft.constant(f"{name}.mean", mean)], f"{name}.centred")
        draft.node("Div", [centred, draft.constant(f"{name}.std", std)], last)
    draft.nodes += nodes


def _to_onnx(model: Model, normalize: bool) -> Any:
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
    draft = OnnxDraft(WHO, dtype, [part.name for part in description.parts])
    shapes, orders = shapes_by_name(description), feature_orders(description, exported=True)
    signals = find_signals(description)
    arrays: dict[str, dict[str, np.ndarray]] = {}
    state = model.state()
    try:
        for slot in slots_of(model, exported=True):
            own = slot.to_theirs(state[slot.name])
            arrays.setdefault(slot.layer, {})[slot.what] = own
        first = {part.name: part for part in description.parts}
        for part in description.parts:
            made, draft.layer = first[part.same_as or part.name].layer, part.name
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
                bool(signals[part.inputs[0]]),
            )
            WRITERS[made.kind](draft, place)
        for name in description.outputs:
            if len(shapes[name]) == 1 and orders[name] is not None:
                raise ValueError(
                    f"output {name}: the features have another order in ONNX; export the model "
                    "without the Flatten at its end, or with a Linear behind it"
                )
        if normalize:
            _add_normalization(draft, model)
    except ValueError as error:
        raise ValueError(f"{WHO}: {error}") from error
    return _message(draft, model, normalize)


def _message(draft: OnnxDraft, model: Model, normalize: bool) -> Any:
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
        doc_string=f"For inference, opset {OPSET}. Images are N, C, H, W, and "
        + ("raw: the graph normalises them." if normalize else "normalised."),
    )
    properties = {"opset": str(OPSET), "layout": "NCHW", "trained_as": model.dtype.name}
    if statistics := statistics_of(model):
        properties["normalization"] = "in the graph" if normalize else "(x - mean) / std before it"
        for name, values in statistics.items():
            for what, value in zip(("mean", "std"), values, strict=True):
                key = what if len(description.inputs) == 1 else f"{name}.{what}"
                properties[key] = json.dumps(value.tolist())
    helper.set_model_props(message, properties)
    onnx.checker.check_model(message)
    return message
