"""`check_loss` and `check_metric` find what breaks the contract, and say what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.losses import LOSSES, CategoricalCrossEntropy, Loss, MeanSquaredError
from pydtnn.metrics import METRICS, Metric, TopKAccuracy
from pydtnn.tools.testing import check_loss, check_metric
from pydtnn.tools.testing.__main__ import main
from tests.each import each


class Square(Loss):
    """A correct loss; the broken ones below differ in one thing."""

    def check(self, shape: tuple[int, ...], target: Any) -> None:
        if shape != target.shape:
            raise ValueError(f"Square: expected targets of shape {shape}, got {target.shape}")

    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        out[...] = 2 * scale * (y - target)
        return ((y - target) ** 2).sum()


@each("backend", ["numpy", "cpu"])
@each("name", LOSSES)
def test_the_losses_of_the_library_pass(name, backend):
    check_loss(LOSSES[name](), (4,), backend=backend)


@each("name", METRICS)
def test_the_metrics_of_the_library_pass(name):
    check_metric(TopKAccuracy(2) if name == "top_k_accuracy" else METRICS[name](), (4,))


def test_targets_can_be_given():
    check_loss(MeanSquaredError(), (4, 3, 2))
    check_loss(MeanSquaredError(), (1,), np.arange(6.0))
    check_loss(CategoricalCrossEntropy(0.1, [1, 2, 3, 4]), (4,), np.arange(4))


class Mean(Square):
    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        return super().compute(backend, y, target, scale, out) / max(len(y), 1)


class Changed(Square):
    """Changes the value, and multiplies the gradient by a factor."""

    def __init__(self, change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
        self.change = change

    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        value = super().compute(backend, y, target, scale, out)
        value, factor = self.change(value, y, scale)
        out *= factor
        return value


class ChangesPredictions(Square):
    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        value = super().compute(backend, y, target, scale, out)
        y += 1
        return value


class Imprecise(Square):
    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        shift = y.dtype.type(1e5)
        return super().compute(backend, (y + shift) - shift, target, scale, out)


class ChecksNothing(Square):
    def check(self, shape: tuple[int, ...], target: Any) -> None:
        pass

    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        n = min(len(y), len(target))
        out[n:] = 0
        return super().compute(backend, y[:n], target[:n], scale, out[:n])


RNG = np.random.default_rng(0)
BROKEN_LOSSES = [
    (Mean(), r"sum of the results for shards .* \(sums over samples, not means\), is wrong"),
    (Changed(lambda value, y, scale: (value if len(y) else np.nan, 1)), "for no samples is wrong"),
    (Changed(lambda value, y, scale: (value, 0.5)), r"the gradient at \(\d, \d\) is wrong"),
    (Changed(lambda value, y, scale: (value, 1 + 1e-3 * (len(y) < 5))), "the gradient of a shard"),
    (Changed(lambda value, y, scale: (value, 1 / scale)), "the gradient with scale 0.375 is wrong"),
    (Changed(lambda value, y, scale: (scale * value, 1)), "the loss, of which scale is not a fac"),
    (Changed(lambda value, y, scale: (np.full(len(y), value), 1)), "it must return one number"),
    (Changed(lambda value, y, scale: (value, [1, 1, np.nan])), "to the whole of `out`, got N"),
    (ChangesPredictions(), "the predictions are changed; compute on a copy"),
    (Changed(lambda value, y, scale: (value * RNG.uniform(), 1)), "the result must be the same if"),
    (Imprecise(), "the loss in float32 is wrong"),
    (ChecksNothing(), "targets of 4 samples for predictions of 5 must raise ValueError"),
]


@each(("loss", "sentence"), BROKEN_LOSSES)
def test_a_broken_loss_is_told_what_it_breaks(loss, sentence):
    check_loss(Square(), (3,))
    with pytest.raises(AssertionError, match=f"^{type(loss).__name__}: .*{sentence}"):
        check_loss(loss, (3,))


class Far(Metric):
    name = "far"

    def check(self, shape: tuple[int, ...], target: Any) -> None:
        if shape != target.shape:
            raise ValueError("Far: expected targets of the shape of the predictions")

    def compute(self, xp: Any, y: Any, target: Any) -> Any:
        return (abs(y - target) > 1).any(axis=1).sum()


class Share(Far):
    def compute(self, xp: Any, y: Any, target: Any) -> Any:
        return super().compute(xp, y, target) / max(len(y), 1)


def test_a_broken_metric_is_told_what_it_breaks():
    check_metric(Far(), (3,))
    for metric, sentence in (
        (type("Nameless", (Far,), {"name": None})(), "Nameless: it must have a `name`"),
        (type("High", (Far,), {"better": "high"})(), "High: `better` must be 'min' or 'max', got"),
        (Share(), "Share: .*not means"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            check_metric(metric, (3,))


def test_what_is_neither_is_refused():
    with pytest.raises(TypeError, match="check_loss: expected a Loss, got 'mse'"):
        check_loss("mse", (3,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check_metric: batch must be at least 3, got 2"):
        check_metric(Far(), (3,), batch=2)


def test_the_command_line_checks_them(capsys):
    assert main([f"{__file__}:Square"]) == 0
    assert main([f"{__file__}:Far", "--shape=2,2"]) == 0
    assert main([f"{__file__}:Mean"]) == 1
    printed = capsys.readouterr()
    assert "Square: all checks passed for samples of shape (3,)" in printed.out
    assert "Far: all checks passed for samples of shape (2, 2)" in printed.out
    assert printed.err.startswith("Mean: the sum of the results")
