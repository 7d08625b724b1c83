"""One array or several: samples of models with several inputs, targets of several outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shape = tuple[int, ...]


def parts(value: Any) -> tuple[Any, ...]:
    """Return one object, or a tuple of several, as a tuple.

    >>> parts(1), parts((1, 2))
    ((1,), (1, 2))
    """
    return value if isinstance(value, tuple) else (value,)


def each(call: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Call a function with an object, or with each of several; return one result, or a tuple.

    >>> each(abs, -1), each(abs, (-1, -2))
    (1, (1, 2))
    """
    if not isinstance(first, tuple):
        return call(first, *others)
    return tuple(call(*values) for values in zip(first, *others, strict=True))


def each_names(call: Callable[[tuple[str, ...]], Any], class_names: Any) -> Any:
    """Call a function with the names of classes of one target, or of each of several.

    >>> each_names(len, ("cat", "dog")), each_names(len, (("cat", "dog"), None))
    (2, (2, None))
    """
    if all(isinstance(name, str) for name in class_names):
        return call(class_names)
    return tuple(None if names is None else call(names) for names in class_names)


def shapes_of(input_shape: Shape | tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return the shapes of one input, or of several, as a tuple of shapes.

    >>> shapes_of((8, 8, 3)), shapes_of(((8, 8, 3), (5,)))
    (((8, 8, 3),), ((8, 8, 3), (5,)))
    """
    shapes: Any = input_shape if is_several(input_shape) else (input_shape,)
    return tuple(shapes)


def is_several(input_shape: Shape | tuple[Shape, ...]) -> bool:
    """Return whether the shape is that of several inputs."""
    return len(input_shape) > 0 and isinstance(input_shape[0], tuple)
