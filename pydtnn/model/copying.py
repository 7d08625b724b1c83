"""Copies of models, also in other processes: networks are constructed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydtnn.kernels import Backend, create_backend
from pydtnn.layers.base import Layer
from pydtnn.layers.blocks import Block
from pydtnn.utils.arguments import Construction, construction_of

SIMPLE = (bool, int, float, str, type(None))
"""Types of the attributes of layers that are copied, as they may be set after construction."""


def replaced(
    value: Any, kinds: Any, replace: Callable[..., Any], known: dict[int, Any] | None = None
) -> Any:
    """Return an argument with ``replace(kind, args, keywords)`` in the place of objects in it.

    Parameters
    ----------
    value : object
        Or lists, tuples and dicts of them.
    kinds : type
        ``Layer | Block``, or `Construction`.
    replace : callable
        Called once for each object, after those in its arguments.
    """
    known = {} if known is None else known
    if isinstance(value, kinds):
        if id(value) not in known:
            made = value if isinstance(value, Construction) else construction_of(value)
            inner = (replaced(part, kinds, replace, known) for part in (made.args, made.keywords))
            known[id(value)] = replace(made.kind, *inner)
        return known[id(value)]
    if type(value) is dict:
        return {key: replaced(own, kinds, replace, known) for key, own in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(own, kinds, replace, known) for own in value)
    return value


def take_apart(model: Any) -> tuple[Any, ...]:
    """Return what `rebuild_model` makes a copy of a model from, without objects of a process.

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
    options["net"] = replaced(options["net"], Layer | Block, Construction)
    options["backend"] = model.backend.name, model.backend.threads
    attributes: list[dict[str, Any]] = [{"inputs": model.inputs, "loaded": model.loaded}]
    for layer in model.layers:
        attributes.append({k: v for k, v in vars(layer).items() if isinstance(v, SIMPLE)})
    return type(model), options, model.frozen, model.state(), attributes


def rebuild_model(parts: tuple[Any, ...], backend: Backend | None = None) -> Any:
    """Return a copy of a model, by default on a new backend."""
    kind, options, frozen, state, attributes = parts
    name, threads = options["backend"]
    backend = backend or create_backend(name, threads=threads)
    net = replaced(options["net"], Construction, lambda kind, args, named: kind(*args, **named))
    model = kind(**{**options, "net": net, "backend": backend})
    model.set_frozen(frozen)
    model.load(state)
    for target, own in zip((model, *model.layers), attributes, strict=True):
        vars(target).update(own)
    return model
