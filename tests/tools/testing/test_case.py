"""`check_layer` finds the layers that break the contract, and says what they break."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import Add, BatchNorm, Dropout, Layer, Linear, ReLU, Sigmoid, StepContext
from pydtnn.layers.base import RESULTS
from pydtnn.model import Model
from pydtnn.tools.testing import check_layer
from pydtnn.tools.testing.__main__ import main
from pydtnn.tools.testing.values import DIFFERENCES
from tests.each import each


class Square(Layer):
    """A correct layer that declares everything; the broken ones below differ in one thing."""

    saves: tuple[str, ...] = ("input",)
    new_results = RESULTS
    may_overwrite = ("dy",)

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0] ** 2, xs[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        dx = self.gradient_like(dy)
        np.multiply(2 * saved, dy, out=dx)
        return dx


class Plain(Square):
    """The same without declarations."""

    saves = ("input", "output")
    new_results = may_overwrite = ()


class WrongBehindReLU(Plain):
    """Adds the positive part of the sum of a sample, without its derivative."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        (x,) = xs
        return x + np.maximum(x.sum(axis=1, keepdims=True), 0), None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy.copy()


def test_a_wrong_derivative_behind_a_unit_that_is_0_for_the_seed_is_found():
    dead = [s for s in range(9) if np.random.default_rng(s).normal(size=(1, 3)).sum() < 0]
    seed = next(s for s in dead if s + 1 not in dead)
    with pytest.raises(AssertionError, match="input 0 in a random direction is wrong"):
        check_layer(WrongBehindReLU(), (3,), batch=1, seed=seed)


class WrongOnce(Plain):
    """One of a thousand gradients has the wrong sign."""

    def backward(self, dy: Any, saved: Any) -> Any:
        dx = super().backward(dy, saved)
        dx[:, 500] *= -1
        return dx


def test_a_wrong_entry_of_a_thousand_is_found_in_a_random_direction():
    with pytest.raises(AssertionError, match="of input 0 in a random direction is wrong"):
        check_layer(WrongOnce(), (1000,))


class Unread(Plain):
    """Has a parameter that changes nothing."""

    def build(self, *shapes: Any) -> Any:
        self.unread = self.parameter("unread", (2,), "zeros")
        return shapes[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        self.unread.store_grad(0 * self.unread.value)
        return super().backward(dy, saved)


def test_a_gradient_of_0_throughout_is_a_warning():
    words = r"Unread in (training|evaluation): the gradient of .*unread is 0 for 3 seeds"
    with pytest.warns(UserWarning, match=words) as caught:
        check_layer(Unread(), (3,))
    assert len(caught) == 2


class KeepsOnSelf(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        self.x = xs[0]
        return xs[0] ** 2, None

    def backward(self, dy: Any, saved: Any) -> Any:
        return 2 * self.x * dy


class SavesOutput(Square):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        y = xs[0] ** 2
        return y, (xs[0], {"y": [y]})

    def backward(self, dy: Any, saved: Any) -> Any:
        return super().backward(dy, saved[0])


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


class Noise(Square):
    """Has random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, *xs: Any, context: StepContext) -> Any:
        noise = self.rng.normal(size=xs[0].shape).astype(xs[0].dtype)
        return xs[0] ** 2 + noise, xs[0]


class SeededNoise(Noise):
    """Draws them as it should."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        self.rng = np.random.default_rng([context.seed, context.epoch, *context.samples])
        return super().forward(*xs, context=context)


class WrongInEvaluation(BatchNorm):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        y, (x, n, *moments) = super().forward(*xs, context=context)
        return y, (x, min(n, 3.0), *moments)


def mine(*arguments: Any, base: type[Layer] = Square, **body: Any) -> Layer:
    """Make a layer that differs in attributes; `y` is its output, `dx` its gradient."""
    if output := body.pop("y", None):
        body["forward"] = lambda self, *xs, context: (output(self, xs[0]), xs[0])
    if gradient := body.pop("dx", None):
        body["backward"] = gradient
    return type("Mine", (base,), body)(*arguments)


def shifted(shift: float) -> Callable[[Layer, Any], Any]:
    return lambda self, x: ((x + x.dtype.type(shift)) - x.dtype.type(shift)) ** 2


def off(factor: float, where: Any = ...) -> Callable[[Layer, Any, Any], Any]:
    """A gradient that is wrong by a factor of the largest one, in the same direction."""

    def backward(self: Layer, dy: Any, saved: Any) -> Any:
        dx = Square.backward(self, dy, saved)  # type: ignore[arg-type]
        dx[where] += factor * abs(dx).max(initial=0)
        return dx

    return backward


def never_adds(self: Any, dy: Any, saved: Any) -> Any:
    Linear.backward(self, dy, saved)
    self.b.grad[...] = dy.sum(axis=0)
    return dy @ self.w.value


IMAGE, ROW = ((3, 2),), ((5,),)
BROKEN: list[tuple[Layer, tuple[tuple[int, ...], ...], str]] = [
    (mine(dx=off(0.001, (-1, -1, -1))), IMAGE, r"input 0 at \(2, 2, 1\) is wrong: central differ"),
    (mine(build=lambda self, *shapes: (*shapes[0], 1)), IMAGE, r"3 outputs of shape \(3, 2, 1\)"),
    (mine(dx=lambda self, dy, x: (2 * x * dy)[:, :1]), IMAGE, r"besides .* got shape \(3, 1, 2\)"),
    (KeepsOnSelf(), IMAGE, "the gradient of input 0 is wrong with two batches in flight"),
    (Noise(), IMAGE, "in training: forward is not repeatable: the output .* `context.seed`"),
    (
        mine(
            base=Noise,
            forward=Square.forward,
            dx=lambda self, dy, x: 2 * x * dy * (1 + 1e-9 * self.rng.normal()),
        ),
        IMAGE,
        "backward is not repeatable: the gradient of input 0 of the same b",
    ),
    (
        mine(
            may_overwrite=("input",),
            forward=lambda self, *xs, context: (xs[0].copy(), np.square(xs[0], out=xs[0]))[::-1],
        ),
        IMAGE,
        "input 0 is overwritten, although `overwrites_input` is not set",
    ),
    (mine(dx=lambda self, dy, x: np.multiply(dy, 2 * x, out=dy)), IMAGE, "dy is overwritten, alth"),
    (mine(saves=()), IMAGE, r"its input is still referenced after forward, but `saves` is \(\)"),
    (SavesOutput(), IMAGE, "its output is still referenced after forward, but `saves` is"),
    (mine(y=lambda self, x: x, dx=lambda self, dy, x: dy * 1), IMAGE, "output shares memory with"),
    (
        mine(may_overwrite=(), y=lambda self, x: x * 1, dx=lambda self, dy, x: dy),
        IMAGE,
        "the gradient of input 0 shares memory .* despite `new_results`",
    ),
    (
        mine(
            base=Add,
            new_results=("output", "gradient"),
            views=(),
            dx=lambda self, dy, x: (dy.copy(),) * 2,
        ),
        IMAGE * 2,
        "the gradient of input 1 shares memory .* or with another",
    ),
    (mine(views=("output",)), IMAGE, "the output is not a view of the input"),
    (mine(dx=lambda self, dy, x: 2 * x * dy), IMAGE, "must overwrite dy if `overwrites_dy"),
    (  # its derivative needs the input, which it says may be overwritten
        mine(may_overwrite=("input",), y=lambda self, x: np.square(x, out=self.output_like(x))),
        IMAGE,
        "the gradient of input 0 is wrong when it may overwrite input",
    ),
    (mine(4, base=Linear, dx=never_adds), ROW, r"of mine\.b is wrong with accumulate=True"),
    (ChangesItsWeights(4), ROW, r"the value of changesitsweights\.w is changed"),
    (SkipsParameters(4), ROW, r"the gradient of .* is wrong where `needs_dx` is not set"),
    (LeavesItsGradient(4), ROW, r"the gradient of .*\.w is wrong in two halves"),
    (FailsOnEmpty(), IMAGE, r"must return 0 outputs of shape \(3, 2\), .* got shape \(1, 3, 2\)"),
    (mine(y=lambda self, x: x**2 * np.float64(1)), IMAGE, "returns float64 in a float32 model"),
    (mine(y=shifted(1e5)), IMAGE, "the output is wrong in float32"),
    (
        mine(supports=("16 bits",), y=lambda self, x: x * np.float32(1) * x),
        IMAGE,
        "forward returns float32 in a bfloat16 model",
    ),
    (mine(supports=("16 bits",), y=shifted(100)), IMAGE, "the output is wrong in bfloat16"),
    (WrongInEvaluation(), ((4,),), "WrongInEvaluation in evaluation: the gradient of input 0"),
]


def test_correct_layers_pass():
    check_layer(Square(), (3, 2))
    check_layer(Plain(), (3, 2))
    check_layer(SeededNoise(), (3, 2))  # random numbers of the context
    check_layer(mine(dx=off(0.5 * DIFFERENCES)), (3, 2))  # within the tolerance
    check_layer(mine(y=shifted(100)), (3, 2))  # does not take 16 bits
    for layer in (Linear(3), ReLU(), Dropout(0.5)):
        check_layer(layer, (4,), batch=1)
        assert not layer.bound  # it can be used afterwards


@each(("layer", "shapes", "sentence"), BROKEN)
def test_a_broken_layer_is_told_what_it_breaks(layer, shapes, sentence):
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
        (":Linear:features=3", [], r"expected path/to/file\.py:name; use --options '\{"),
        (":Noise", ["--shape=3,2"], "^Noise in training: forward is not repeatable"),
        (":Linear", [], "Linear: a layer requires the shape of an input .*; add --shape"),
        (":Linear", ["--shape=3"], "missing a required argument: 'features'; add --options"),
        (":twin", ["--plan=data", "--shape=3"], "missing a required argument: 'width'"),
        (":twin", ["--plan=data", '--options={"width": 4}'], "a network requires the shape"),
    ],
)
def test_the_command_line_says_what_is_missing_or_wrong(target, arguments, sentence, capsys):
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
def test_the_command_line_takes_options(arguments, shown, capsys):
    target, *rest = arguments
    assert main([f"{__file__}{target}", *rest, "--shape=3"]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_domains_without_negative_numbers_can_be_asked_for():
    class Root(Sigmoid):
        kernel = "log"

    with np.errstate(invalid="ignore"), pytest.raises(AssertionError, match="Root in training"):
        check_layer(Root(), (4,))
    check_layer(Root(), (4,), positive=True)


def test_a_layer_of_a_model_is_refused():
    layer = Linear(3)
    Model(layer, (2,), backend="numpy")
    with pytest.raises(ValueError, match="check_layer: expected a new Linear, got one of a model"):
        check_layer(layer, (2,))
