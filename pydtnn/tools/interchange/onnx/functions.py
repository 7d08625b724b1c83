"""Functions of one element that several operators compute together, as layers.

Exporters write an activation without an operator of its own as arithmetic: SiLU as a Sigmoid and a
Mul, GELU as five nodes around Erf or Tanh. The function of such nodes is compared with those of the
layers at many points, so that it does not matter in which way it has been written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from pydtnn import layers
from pydtnn.kernels.reference.elementwise import FUNCTIONS, normal
from pydtnn.layers import Layer
from pydtnn.tools.interchange.onnx.views import ModelArray, Value, Wiring

Array = np.ndarray

MAX_OPERATORS = 12
"""Of a function; a longer chain is computed by several layers."""

TEST_VALUES = np.concatenate(
    [np.linspace(-12, 12, 193), *(sign * np.logspace(-30, 30, 61) for sign in (-1, 1))]
)
"""Where functions are compared."""

RTOL, ATOL = 4e-6, 1e-12
"""Bounds of differences: constants in files are rounded to float32, and differences of large terms,
such as 1 + erf(x) for negative x, are small."""


@dataclass(frozen=True, eq=False)
class Function:
    """What operators compute from each element of an array.

    Attributes
    ----------
    base : Source
        The array.
    operator : callable
        The last operator, of one or two arrays of float64.
    arguments : tuple of Function or None
        Of the last operator; None is the array itself.
    layer : callable
        Adds a layer for the last operator, given its arguments; raises ValueError if there is none.
    name : str
        Of the node of the last operator.
    saturates : bool
        Whether the last operator is one of the kind of which an activation has one.
    parts : tuple of Function
        All functions within, and this one as the last.
    made : list of Source
        The result, once there are layers for it.
    """

    base: ModelArray
    operator: Callable[..., Array]
    arguments: tuple[Function | None, ...]
    layer: Callable[..., ModelArray]
    name: str
    saturates: bool = False
    parts: tuple[Function, ...] = field(init=False, repr=False)
    made: list[ModelArray] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        within = dict.fromkeys(part for f in self.arguments if f is not None for part in f.parts)
        object.__setattr__(self, "parts", (*within, self))

    def compute(self, inner: Function | None = None) -> Array | None:
        """Compute the function at `TEST_VALUES`, as one of a function within, or of the array.

        None if it does not only depend on that function.
        """
        values: dict[Function | None, Array] = {inner: TEST_VALUES}
        with np.errstate(all="ignore"):
            for f in self.parts:
                given = [values.get(part) for part in f.arguments]
                if f is not inner and not any(y is None for y in given):
                    values[f] = f.operator(*given)
        return values.get(self)


def extended(
    net: Wiring,
    values: tuple[Value, ...],
    operator: Callable[..., Array],
    layer: Callable[..., ModelArray],
    name: str,
    *,
    saturates: bool = False,
) -> Value:
    """Return the function that an operator computes from one or two values of the same array.

    Parameters
    ----------
    net : Wiring
    values : tuple of Value
        Of the same array, in the same order.
    operator, layer, name, saturates
        See `Function`.
    """
    parts = {part for v in values if v.function is not None for part in v.function.parts}
    bounded = any(part.saturates for part in parts)
    if len(parts) >= MAX_OPERATORS or (bounded and saturates):
        values = tuple(solid(net, v) for v in values)
        if len({v.source for v in values}) > 1:
            return replace(values[0], source=layer(*(v.source for v in values)))
    (x, *_) = values
    f = Function(x.source, operator, tuple(v.function for v in values), layer, name, saturates)
    made = replace(x, function=f)
    ends = bounded and not saturates and len(f.parts) > 1 and _match(f, last=True)
    return solid(net, made) if ends else made


def solid(net: Wiring, x: Value) -> Value:
    """Return a value whose function, if it has one, is computed by layers."""
    if x.function is None:
        return x
    return replace(x, source=_source(net, x.function), function=None)


def _source(net: Wiring, f: Function) -> ModelArray:
    """Return the result of a function, for which layers are added once."""
    if not f.made:
        match = _match(f)
        if match is None:
            of = [f.base if part is None else _source(net, part) for part in f.arguments]
            f.made.append(f.layer(*of))
        else:
            inner, layer = match
            x = f.base if inner is None else _source(net, inner)
            f.made.append(x if layer is None else ModelArray(net.add(f.name, layer(), x.node)))
    return f.made[0]


def _match(
    f: Function, *, last: bool = False
) -> tuple[Function | None, Callable[[], Layer] | None] | None:
    """Return a function within, and the layer that computes the rest; no layer for the identity.

    Parameters
    ----------
    f : Function
    last : bool
        Whether to consider only activations that are not a part of others.
    """
    for inner in (None, *f.parts[:-1]):
        y = f.compute(inner)
        if y is None:
            continue
        if not last and _equals(y, TEST_VALUES):
            return inner, None
        factor = float(y[-1] / TEST_VALUES[-1])
        if not last and 0 < abs(factor) < np.inf and _equals(y, factor * TEST_VALUES):
            return inner, partial(layers.Rescale, decimal(factor))
        names = COMPOSITE if last else (*LAYERS,)
        for i in np.flatnonzero(_equals(y, _activations(names)))[:1]:
            return inner, LAYERS[names[i]]
    return None


def factor_of(f: Function | None) -> float | None:
    """Return the number by which a function multiplies; None if it is another function."""
    y = TEST_VALUES if f is None else f.compute()
    if y is None:
        return None
    factor = float(y[-1] / TEST_VALUES[-1])
    return factor if _equals(y, factor * TEST_VALUES) else None


def _equals(a: Array, b: Array) -> Array:
    """Return whether values at `TEST_VALUES` are equal, for each row of `b`."""
    with np.errstate(all="ignore"):
        return (abs(a - b) <= RTOL * abs(b) + ATOL * np.minimum(1, abs(TEST_VALUES))).all(-1)


LAYERS: dict[str, Callable[[], Layer]] = {
    "relu": layers.ReLU,
    "relu6": layers.ReLU6,
    "sigmoid": layers.Sigmoid,
    "tanh": layers.Tanh,
    "gelu": layers.GELU,
    "gelu_exact": lambda: layers.GELU("none"),
    "silu": layers.SiLU,
    "hard_swish": layers.HardSwish,
    "hard_sigmoid": layers.HardSigmoid,
    "softplus": layers.Softplus,
}
"""Activations by the names of their kernels."""


COMPOSITE = ("gelu", "gelu_exact", "silu", "hard_swish")
"""Those that are not a part of others."""


@cache
def _activations(names: tuple[str, ...]) -> Array:
    """Return the values of activations at `TEST_VALUES`, one in a row."""
    with np.errstate(all="ignore"):
        return np.stack([FUNCTIONS[name].forward(np, TEST_VALUES, 0.0) for name in names])


def decimal(number: float) -> float:
    """Return a number, the shortest decimal of it if it is one of float32."""
    with np.errstate(all="ignore"):
        short = np.float32(number)
    return float(str(short)) if abs(float(short) - number) <= 4e-16 * abs(number) else number


def erf(x: Array) -> Array:
    """Return the error function."""
    return 2 * normal(np, x * np.sqrt(2))[0] - 1
