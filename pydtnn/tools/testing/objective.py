"""Checks of the contracts of losses and metrics."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Shape
from pydtnn.losses import Loss
from pydtnn.metrics import Metric
from pydtnn.tools.testing.case import largest_error
from pydtnn.tools.testing.values import DIFFERENCES, ENTRIES, SINGLE, STEP, derivative
from pydtnn.utils.validate import check_int

REPEATED = 1e-10
"""Tolerance in float64 of sums in another order."""

SCALE = 0.375
"""A factor on the gradient that float32 and float64 represent exactly."""


def check_loss(
    loss: Loss,
    shape: Shape,
    target: Array | None = None,
    *,
    backend: Backend | str = "numpy",
    batch: int = 5,
    seed: int = 0,
) -> None:
    """Check the contract of a loss.

    The loss is the sum over the samples, so that it adds up over shards of any size, and 0 without
    samples. It writes its gradient times `scale`, which agrees with central differences in float64,
    to the whole of `out`. It does not change its arguments, and returns the same if repeated.
    float32 agrees with float64. Targets of another number of samples raise ValueError.

    Parameters
    ----------
    loss : Loss
    shape : tuple of int
        Shape of the predictions for one sample, such as ``(classes,)``.
    target : array, shape ``(batch, ...)``, optional
        Targets; by default random numbers in [0, 1] of the shape of the predictions, or if the loss
        refuses these, random classes.
    backend : Backend or str
    batch : int
        Samples, if no targets are given; at least 3.
    seed : int
        Seed of the random predictions and targets.

    Raises
    ------
    AssertionError
        With the loss, the quantity that is wrong, and the difference.

    Examples
    --------
    >>> from pydtnn.losses import MeanSquaredError
    >>> check_loss(MeanSquaredError(), (4,))
    """
    case = _ObjectiveCase("check_loss", loss, Loss, shape, target, backend, batch, seed)
    y, target = case.y, case.target

    def compute(y: Array, target: Array, scale: float = 1.0) -> tuple[float, np.ndarray]:
        out = case.backend.empty(y.shape, y.dtype)
        out[...] = np.nan
        value, dy = loss(case.backend, y, target, scale, out)
        if dy is not out:
            raise case.fail("the gradient must be written to `out`")
        return case.number(value), case.backend.to_numpy(out).copy()

    value, dy = compute(y, target)
    case.check_arguments()
    if np.isnan(dy).any():
        raise case.fail("the gradient must be written to the whole of `out`, got NaN")
    case.check_sums(lambda rows: compute(y[rows], target[rows])[0], value)
    _check_differences(case, lambda: compute(y, target)[0], dy)
    for rows in case.shards():
        case.compare("the gradient of a shard", compute(y[rows], target[rows])[1], dy[rows])
    again, scaled = compute(y, target, SCALE)
    case.compare(f"the gradient with scale {SCALE}", scaled, SCALE * dy)
    case.compare("the loss, of which scale is not a factor,", again, value)
    if compute(y, target)[1].tobytes() != dy.tobytes():
        raise case.fail("the gradient must be the same if it is computed again")
    single, narrow = compute(*case.single())
    if narrow.dtype != np.float32:
        raise case.fail(f"the gradient must be float32 for float32 predictions, got {narrow.dtype}")
    case.compare("the loss in float32", single, value, SINGLE)
    case.compare("the gradient in float32", narrow, dy, SINGLE)
    case.check_refusal(lambda target: compute(y, target))


def check_metric(
    metric: Metric,
    shape: Shape,
    target: Array | None = None,
    *,
    backend: Backend | str = "numpy",
    batch: int = 5,
    seed: int = 0,
) -> None:
    """Check the contract of a metric.

    It is the sum over the samples, so that it adds up over shards of any size, and 0 without
    samples. It does not change its arguments, returns the same if repeated, accepts float32, and
    raises ValueError for targets of another number of samples. It has a name.

    Parameters
    ----------
    metric : Metric
    shape, target, backend, batch, seed
        See `check_loss`.

    Raises
    ------
    AssertionError
        With the metric, the quantity that is wrong, and the difference.

    Examples
    --------
    >>> from pydtnn.metrics import Accuracy
    >>> check_metric(Accuracy(), (4,))
    """
    case = _ObjectiveCase("check_metric", metric, Metric, shape, target, backend, batch, seed)
    y, target, xp = case.y, case.target, case.backend.xp
    if not isinstance(getattr(metric, "name", None), str):
        raise case.fail("it must have a `name`, for the logs")
    if metric.better not in ("min", "max", ""):
        raise case.fail(
            f"`better` must be 'min' or 'max', got {metric.better!r}; it is empty for arrays"
        )
    value = case.number(metric(xp, y, target))
    case.check_arguments()
    case.check_sums(
        lambda rows: case.number(metric(xp, y[rows], target[rows])),
        value,
        lambda sums: metric.result(sums, len(y)),
    )
    case.compare("the metric in float32", case.number(metric(xp, *case.single())), value, SINGLE)
    case.check_refusal(lambda target: metric(xp, y, target))


class _ObjectiveCase:
    """Random predictions and targets for a loss or metric."""

    def __init__(
        self,
        who: str,
        checked: Loss | Metric,
        kind: type,
        shape: Shape,
        target: Array | None,
        backend: Backend | str,
        batch: int,
        seed: int,
    ) -> None:
        if not isinstance(checked, kind):
            raise TypeError(f"{who}: expected a {kind.__name__}, got {checked!r}")
        self.checked = checked
        self.backend = create_backend(backend) if isinstance(backend, str) else backend
        self.rng = np.random.default_rng(seed)
        batch = check_int(who, "batch", batch if target is None else len(target), at_least=3)
        self.y = self.backend.asarray(2 * self.rng.normal(size=(batch, *shape)))
        self.target = self._targets() if target is None else self.backend.asarray(target)
        self.given = self.y.copy(), self.target.copy()

    def _targets(self) -> Array:
        shape = self.y.shape
        dense = self.backend.asarray(self.rng.uniform(size=shape))
        try:
            self.checked.check(shape, dense)
        except ValueError:
            return self.backend.asarray(self.rng.integers(0, shape[-1], len(self.y)))
        return dense

    def single(self) -> tuple[Array, Array]:
        """Return predictions, and targets unless they are classes, in float32."""
        target = self.target
        return self.y.astype("float32"), (
            target.astype("float32") if target.dtype.kind == "f" else target
        )

    def shards(self) -> list[slice]:
        """Return shards of different sizes, one of them empty."""
        return [slice(0, 1), slice(1, 1), slice(1, len(self.y))]

    def number(self, value: Any) -> Any:
        """Return a loss or metric as a float, or as an array if it has several sums."""
        array = np.asarray(self.backend.to_numpy(value) if hasattr(value, "dtype") else value)
        size = getattr(self.checked, "size", 1)
        if array.shape != (() if size == 1 else (size,)) or array.dtype.kind not in "fiub":
            sums = "one number, the sum" if size == 1 else f"{size} numbers, sums"
            raise self.fail(f"it must return {sums} over the samples, got {value!r}")
        return float(array) if size == 1 else array.astype("float64")

    def check_arguments(self) -> None:
        """Check that predictions and targets have not changed."""
        for what, now, before in zip(
            ("predictions", "targets"), (self.y, self.target), self.given, strict=True
        ):
            if not bool((now == before).all()):
                raise self.fail(f"the {what} are changed; compute on a copy")

    def check_sums(
        self,
        part: Callable[[slice], Any],
        value: Any,
        result: Callable[[Any], Any] = lambda sums: sums,
    ) -> None:
        """Check that shards add up to a result, which is 0 without samples and repeatable."""
        if not np.array_equal(part(slice(0, len(self.y))), value):
            raise self.fail("the result must be the same if it is computed again")
        self.compare("the result for no samples", part(slice(0, 0)), 0.0)
        total = sum(map(part, self.shards()))
        self.compare(
            "the sum of the results for shards of 1, 0 and the other samples, which must be that "
            "of all (sums over samples, not means),",
            result(total),
            result(value),
        )

    def check_refusal(self, compute: Callable[[Array], Any]) -> None:
        """Check that targets of fewer samples are refused."""
        try:
            compute(self.target[1:])
        except ValueError:
            return
        raise self.fail(
            f"targets of {len(self.y) - 1} samples for predictions of {len(self.y)} must raise "
            "ValueError; compare the shapes in `check`"
        )

    def compare(self, what: str, got: Any, want: Any, tolerance: float = REPEATED) -> None:
        """Check that numbers agree within `tolerance` of the largest."""
        got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
        error, at = largest_error(got, want) if got.size else (0.0, ())
        if not error <= tolerance:
            place = f" at {at}" if at else ""
            raise self.fail(f"{what} is wrong{place}: expected {want[at]:.8g}, got {got[at]:.8g}")

    def fail(self, sentence: str) -> AssertionError:
        """Return the error of a failed check."""
        return AssertionError(f"{type(self.checked).__name__}: {sentence}")


def _check_differences(case: _ObjectiveCase, value: Callable[[], float], dy: np.ndarray) -> None:
    """Check the gradient against central differences."""
    tolerance = DIFFERENCES * max(abs(dy).max(), 1e-3)
    for flat in case.rng.permutation(prod(dy.shape))[:ENTRIES]:
        at = tuple(map(int, np.unravel_index(flat, dy.shape)))
        step = np.zeros(dy.shape)
        step[at] = STEP
        measured = derivative(value, case.y, case.backend.asarray(step))
        if not abs(measured - dy[at]) <= tolerance:
            raise case.fail(
                f"the gradient at {at} is wrong: central differences give {measured:.8g}, got "
                f"{dy[at]:.8g} (tolerance {tolerance:.0e})"
            )
