"""Copies of models, also in other processes: networks are constructed again."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels import Backend, create_backend
from pydtnn.layers.base import Layer
from pydtnn.layers.blocks import Block
from pydtnn.utils.arguments import Construction, construction_of

SIMPLE = (bool, int, float, str, type(None))
"""Types of the attributes of layers that are copied, as they may be set after construction."""


def unbound(value: Any, known: dict[int, Any]) -> Any:
    """Replace layers and blocks in an argument by their constructions, each by one."""
    if isinstance(value, Layer | Block):
        if id(value) not in known:
            made = construction_of(value)
            args, keywords = unbound(made.args, known), unbound(made.keywords, known)
            known[id(value)] = Construction(made.kind, args, keywords)
        return known[id(value)]
    if type(value) is dict:
        return {key: unbound(own, known) for key, own in value.items()}
    return type(value)(unbound(v, known) for v in value) if type(value) in (list, tuple) else value


def construct(value: Any, known: dict[int, Any]) -> Any:
    """Replace the constructions of `unbound` by new objects."""
    if isinstance(value, Construction):
        if id(value) not in known:
            args, keywords = construct(value.args, known), construct(value.keywords, known)
            known[id(value)] = value.kind(*args, **keywords)
        return known[id(value)]
    if type(value) is dict:
        return {key: construct(own, known) for key, own in value.items()}
    return (
        type(value)(construct(v, known) for v in value) if type(value) in (list, tuple) else value
    )


def take_apart(model: Any) -> tuple[Any, ...]:
    """Return what `put_together` makes a copy of a model from, without objects of a process.

    Raises
    ------
    TypeError
        If ranks have parts of the model.
    """
    if model.mesh is not None:
        raise TypeError(
            "Model: expected a model that each rank has as a whole, to copy or pickle it, got one "
            f"on {model.mesh}; load model.state() into another one"
        )
    options = dict(construction_of(model).bind().arguments)
    options["net"] = unbound(options["net"], {})
    options["backend"] = model.backend.name, model.backend.threads
    attributes: list[dict[str, Any]] = [{"inputs": model.inputs, "loaded": model.loaded}]
    for layer in model.layers:
        attributes.append({k: v for k, v in vars(layer).items() if isinstance(v, SIMPLE)})
    return type(model), options, model.frozen, model.state(), attributes


def put_together(parts: tuple[Any, ...], backend: Backend | None = None) -> Any:
    """Return a copy of a model, by default on a new backend."""
    kind, options, frozen, state, attributes = parts
    name, threads = options["backend"]
    backend = backend or create_backend(name, threads=threads)
    model = kind(**{**options, "net": construct(options["net"], {}), "backend": backend})
    model.set_frozen(frozen)
    model.load(state)
    for target, own in zip((model, *model.layers), attributes, strict=True):
        vars(target).update(own)
    return model
