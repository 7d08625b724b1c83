"""`check_layer` finds the layers that break the contract, and says what they break."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import Add, BatchNorm, Dropout, Layer, Linear, ReLU, Sigmoid, StepContext
from pydtnn.model import Model
from pydtnn.testing import check_layer
from pydtnn.testing.__main__ import main
from pydtnn.testing.values import DIFFERENCES
from tests.each import each


class Square(Layer):
    """A correct layer that declares everything; the broken ones below differ in one thing."""

    saves: tuple[str, ...] = ("input",)
    new_output = new_gradient = True
    may_overwrite_dy = True

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0] ** 2, xs[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        dx = self.gradient_like(dy)
        np.multiply(2 * saved, dy, out=dx)
        return dx


class Plain(Square):
    """The same without declarations."""

    saves = ("input", "output")
    new_output = new_gradient = may_overwrite_dy = False


class WrongBehindReLU(Plain):
    """Adds the positive part of the sum of a sample, without its derivative."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        (x,) = xs
        return x + np.maximum(x.sum(axis=1, keepdims=True), 0), None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy.copy()


def test_a_wrong_derivative_behind_a_unit_that_is_0_for_the_seed_is_found() -> None:
    dead = [s for s in range(9) if np.random.default_rng(s).normal(size=(1, 3)).sum() < 0]
    seed = next(s for s in dead if s + 1 not in dead)
    with pytest.raises(AssertionError, match="the gradient of input 0 at .* is wrong"):
        check_layer(WrongBehindReLU(), (3,), batch=1, seed=seed)


class Unread(Plain):
    """Has a parameter that changes nothing."""

    def build(self, *shapes: Any) -> Any:
        self.unread = self.parameter("unread", (2,), "zeros")
        return shapes[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        self.unread.store_grad(0 * self.unread.value)
        return super().backward(dy, saved)


def test_a_gradient_of_0_throughout_is_a_warning() -> None:
    words = r"Unread in (training|evaluation): the gradient of .*unread is 0 for 3 seeds"
    with pytest.warns(UserWarning, match=words) as caught:
        check_layer(Unread(), (3,))
    assert len(caught) == 2


class SlightlyOff(Square):
    """Its gradient is off by half of what is allowed, in the same direction everywhere."""

    def backward(self, dy: Any, saved: Any) -> Any:
        dx = super().backward(dy, saved)
        return np.add(dx, 0.5 * DIFFERENCES * abs(dx).max(initial=0), out=dx)


class WrongInOnePlace(Square):
    def backward(self, dy: Any, saved: Any) -> Any:
        dx = 2 * saved * dy
        dx[-1, -1, -1] *= 1.001
        return dx


class WrongShape(Square):
    def build(self, *shapes: Any) -> Any:
        return (*shapes[0], 1)


class WrongGradientShape(Square):
    def backward(self, dy: Any, saved: Any) -> Any:
        return (2 * saved * dy)[:, :1]


class KeepsOnSelf(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        self.x = xs[0]
        return xs[0] ** 2, None

    def backward(self, dy: Any, saved: Any) -> Any:
        return 2 * self.x * dy


class OverwritesInput(Square):
    may_overwrite_input = True

    def forward(self, *xs: Any, context: StepContext) -> Any:
        x = xs[0].copy()
        return np.square(xs[0], out=xs[0]), x


class OverwritesDy(Square):
    def backward(self, dy: Any, saved: Any) -> Any:
        dy *= 2 * saved
        return dy


class SavesMore(Square):
    saves = ()


class SavesOutput(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        y = xs[0] ** 2
        return y, (xs[0], {"y": [y]})

    def backward(self, dy: Any, saved: Any) -> Any:
        return super().backward(dy, saved[0])


class NotNew(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0], None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy * 1


class GradientNotNew(Square):
    may_overwrite_dy = False

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0] * 1, None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy


class OneGradientTwice(Add):
    new_gradient = True
    views = ()

    def backward(self, dy: Any, saved: Any) -> Any:
        dx = dy.copy()
        return dx, dx


class NoView(Square):
    views = ("output",)


class NeverInPlace(Square):
    def backward(self, dy: Any, saved: Any) -> Any:
        return 2 * saved * dy


class InPlaceTooEarly(Square):
    """Its derivative needs the input, which it says may be overwritten."""

    may_overwrite_input = True

    def forward(self, *xs: Any, context: StepContext) -> Any:
        y = self.output_like(xs[0])
        np.square(xs[0], out=y)
        return y, xs[0]


class NeverAdds(Linear):
    def backward(self, dy: Any, saved: Any) -> Any:
        super().backward(dy, saved)
        self.b.grad[...] = dy.sum(axis=0)
        return dy @ self.w.value


class ChangesItsWeights(Linear):
    def backward(self, dy: Any, saved: Any) -> Any:
        dx = super().backward(dy, saved)
        self.w.value *= 0.9
        return dx


class LeavesItsGradient(Linear):
    """The layer before overwrites what the second half reads."""

    def backward_inputs(self, dy: Any, saved: Any) -> Any:
        dx, left = super().backward_inputs(dy, saved)
        return dx, (left, dx, dx.copy())

    def backward_parameters(self, left: Any) -> None:
        if len(left) == 3:
            left, dx, before = left
            dy, saved = left
            left = dy * (dx == before).all(), saved
        super().backward_parameters(left)


class SkipsParameters(Linear):
    """Takes "nobody needs dx" for "nothing to do"."""

    def backward(self, dy: Any, saved: Any) -> Any:
        if not self.needs_dx:
            self.w.grad[...] = self.b.grad[...] = 0
            return None
        return super().backward(dy, saved)


class FailsOnEmpty(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        y, saved = super().forward(*xs, context=context)
        return (y if len(y) else np.ones((1, *y.shape[1:]))), saved


class Promotes(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0] ** 2 * np.float64(1), xs[0]


class Imprecise(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        shift = xs[0].dtype.type(1e5)
        return ((xs[0] + shift) - shift) ** 2, xs[0]


class Widens(Square):
    takes_16_bits = True

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0] * np.float32(1) * xs[0], xs[0]


class Coarse(Square):
    """Has enough digits in float32, but not in what it claims to take."""

    takes_16_bits = True

    def forward(self, *xs: Any, context: StepContext) -> Any:
        shift = xs[0].dtype.type(100)
        return ((xs[0] + shift) - shift) ** 2, xs[0]


class CoarseInFloat32(Coarse):
    takes_16_bits = False


class Noise(Square):
    """Has random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, *xs: Any, context: StepContext) -> Any:
        noise = self.rng.normal(size=xs[0].shape).astype(xs[0].dtype)
        return xs[0] ** 2 + noise, xs[0]


class NoisyGradient(Noise):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0] ** 2, xs[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        return 2 * saved * dy * (1 + 1e-9 * self.rng.normal())


class SeededNoise(Noise):
    """Draws them as it should."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        self.rng = np.random.default_rng([context.seed, context.epoch, *context.samples])
        return super().forward(*xs, context=context)


class WrongInEvaluation(BatchNorm):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        y, (x, n, *moments) = super().forward(*xs, context=context)
        return y, (x, min(n, 3.0), *moments)


IMAGE, ROW = ((3, 2),), ((5,),)
BROKEN: list[tuple[Layer, tuple[tuple[int, ...], ...], str]] = [
    (WrongInOnePlace(), IMAGE, r"gradient of input 0 at \(2, 2, 1\) is wrong: central differences"),
    (WrongShape(), IMAGE, r"must return 3 outputs of shape \(3, 2, 1\), as returned by build, got"),
    (WrongGradientShape(), IMAGE, r"a gradient of shape \(3, 2\) besides .* got shape \(3, 1, 2\)"),
    (KeepsOnSelf(), IMAGE, "the gradient of input 0 is wrong with two batches in flight"),
    (Noise(), IMAGE, "in training: forward is not repeatable: the output .* `context.seed`"),
    (NoisyGradient(), IMAGE, "backward is not repeatable: the gradient of input 0 of the same b"),
    (OverwritesInput(), IMAGE, "input 0 is overwritten, although `overwrites_input` is not set"),
    (OverwritesDy(), IMAGE, "dy is overwritten, although `overwrites_dy` is not set"),
    (SavesMore(), IMAGE, r"its input is still referenced after forward, but `saves` is \(\)"),
    (SavesOutput(), IMAGE, "its output is still referenced after forward, but `saves` is"),
    (NotNew(), IMAGE, "the output shares memory with input 0, despite `new_output`"),
    (GradientNotNew(), IMAGE, "the gradient of input 0 shares memory .* despite `new_gradient`"),
    (OneGradientTwice(), IMAGE * 2, "the gradient of input 1 shares memory .* or with another"),
    (NoView(), IMAGE, "the output is not a view of the input"),
    (NeverInPlace(), IMAGE, "backward must overwrite dy if `overwrites_dy` is set"),
    (InPlaceTooEarly(), IMAGE, "the gradient of input 0 is wrong when it may overwrite input"),
    (NeverAdds(4), ROW, r"the gradient of neveradds\.b is wrong with accumulate=True"),
    (ChangesItsWeights(4), ROW, r"the value of changesitsweights\.w is changed"),
    (SkipsParameters(4), ROW, r"the gradient of .* is wrong where `needs_dx` is not set"),
    (LeavesItsGradient(4), ROW, r"the gradient of .*\.w is wrong in two halves"),
    (FailsOnEmpty(), IMAGE, r"must return 0 outputs of shape \(3, 2\), .* got shape \(1, 3, 2\)"),
    (Promotes(), IMAGE, "forward returns float64 in a float32 model"),
    (Imprecise(), IMAGE, "the output is wrong in float32"),
    (Widens(), IMAGE, "forward returns float32 in a bfloat16 model"),
    (Coarse(), IMAGE, "the output is wrong in bfloat16"),
    (WrongInEvaluation(), ((4,),), "WrongInEvaluation in evaluation: the gradient of input 0"),
]


def test_correct_layers_pass() -> None:
    check_layer(Square(), (3, 2))
    check_layer(Plain(), (3, 2))
    check_layer(SeededNoise(), (3, 2))  # random numbers of the context
    check_layer(SlightlyOff(), (3, 2))
    check_layer(CoarseInFloat32(), (3, 2))  # does not take 16 bits
    for layer in (Linear(3), ReLU(), Dropout(0.5)):
        check_layer(layer, (4,), batch=1)
        assert not layer.bound  # it can be used afterwards


@each(("layer", "shapes", "sentence"), BROKEN)
def test_a_broken_layer_is_told_what_it_breaks(
    layer: Layer, shapes: tuple[tuple[int, ...], ...], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence) as caught:
        check_layer(layer, *shapes)
    assert str(caught.value).startswith(type(layer).__name__)


def twin(width: int, classes: int = 2) -> list[Layer]:
    return [Linear(width, name="first"), Linear(classes, name="last")]


@each(
    ("target", "arguments", "sentence"),
    [
        ("", [], r"expected path/to/file\.py:name, got .*; use .*:Square or .*:Plain or"),
        (":Nothing", [], "^testing: unknown name in .* 'Nothing'"),
        (":IMAGE", [], r"^testing .*:IMAGE: expected a layer, loss, metric or scheme, got \("),
        (":Model", [], "expected a layer, loss, metric or scheme, got <class '.*Model'>"),
        (":Noise", ["--shape=3,2"], "^Noise in training: forward is not repeatable"),
        (":Linear", [], "Linear: a layer requires the shape of an input .*; add --shape"),
        (":Linear", ["--shape=3"], "missing a required argument: 'features'; add --options"),
        (":twin", ["--plan=data", "--shape=3"], "missing a required argument: 'width'"),
        (":twin", ["--plan=data", '--options={"width": 4}'], "a network requires the shape"),
    ],
)
def test_the_command_line_says_what_is_missing_or_wrong(
    target: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{__file__}{target}", *arguments]) == 1
    told = capsys.readouterr().err
    assert re.search(sentence, told)
    assert told.count("\n") == 1


@each(
    ("arguments", "shown"),
    [
        ([":twin", "--mesh=data=2", '--options={"width": 4}'], "plan: 26 parameters"),
        ([":Linear", '--options={"features": 4}'], "Linear: all checks passed"),
        ([":Linear", '--scheme-options={"features": 4}'], "Linear: all checks passed"),
    ],
)
def test_the_command_line_takes_options(
    arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, *rest = arguments
    assert main([f"{__file__}{target}", *rest, "--shape=3"]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_domains_without_negative_numbers_can_be_asked_for() -> None:
    class Root(Sigmoid):
        kernel = "log"

    with np.errstate(invalid="ignore"), pytest.raises(AssertionError, match="Root in training"):
        check_layer(Root(), (4,))
    check_layer(Root(), (4,), positive=True)


def test_a_layer_of_a_model_is_refused() -> None:
    layer = Linear(3)
    Model(layer, (2,), backend="numpy")
    with pytest.raises(ValueError, match="check_layer: expected a new Linear, got one of a model"):
        check_layer(layer, (2,))
