"""A layer that is used several times has one set of parameters, whose gradients are summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn import layers as nn
from pydtnn.model import Model
from tests.each import each
from tests.gpu import to_host


class Twice(nn.Block):
    """Apply a part to the input twice in parallel, or a second part to the other half."""

    def __init__(self, part: nn.Net, other: nn.Net | None = None) -> None:
        super().__init__()
        self.part, self.other = part, part if other is None else other
        self.join = nn.Concat(name="join")

    def wire(self, graph: Any, *inputs: Any) -> Any:
        a, b = inputs
        return graph.add(self.join, graph.add(self.part, a), graph.add(self.other, b))


def tower(name: str | None = "tower") -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 3, padding=1, bias=False),
        nn.BatchNorm(),
        nn.ReLU(),
        nn.Conv2d(4, 3),
        nn.ReLU(),
        name=name,
    )


def head(net: nn.Net) -> nn.Sequential:
    return nn.Sequential(net, nn.Flatten(), nn.Linear(3, name="head"))


SHAPES = [(6, 6, 3), (6, 6, 3)]


def gradients(model: Model, x: tuple[Any, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    context = nn.StepContext(training=True, samples=np.arange(len(x[0])))
    inputs = tuple(model.backend.asarray(part, model.dtype) for part in x)
    y, saved = model.forward(inputs, context)
    model.backward(y, saved)
    return to_host(y).copy(), {n: to_host(p.grad).copy() for n, p in model.parameters.items()}


@each("fuse", [True, False])
def test_the_gradient_is_the_sum_over_the_uses(backend, rng, fuse):
    x = tuple(rng.normal(size=(5, *shape)) for shape in SHAPES)
    shared = Model(head(Twice(tower())), SHAPES, backend=backend, dtype="float64", fuse=fuse)
    pair = Model(
        head(Twice(tower(), tower("second"))), SHAPES, backend=backend, dtype="float64", fuse=fuse
    )
    state = shared.state()
    pair.load({name: state[name.replace("second", "tower")] for name in pair.state()})
    y, summed = gradients(shared, x)
    expected, single = gradients(pair, x)
    np.testing.assert_allclose(y, expected, rtol=1e-12)
    assert sum(p.size for p in shared.parameters.values()) < sum(
        p.size for p in pair.parameters.values()
    )
    for name, grad in summed.items():
        total = single[name] + single.get(name.replace("tower", "second"), 0) * ("tower" in name)
        np.testing.assert_allclose(grad, total, rtol=1e-10, atol=1e-12, err_msg=name)


def test_a_norm_that_is_joined_with_itself_adds_both_gradients(backend, rng):
    class Join(nn.Block):
        """``relu(norm(a) + norm(b))``, which is fused into one layer."""

        def __init__(self, *norms: nn.Layer) -> None:
            super().__init__()
            self.convs, self.norms = [nn.Conv2d(4, 3, name=n) for n in "ab"], norms
            self.end = nn.Sequential(nn.Add(), nn.ReLU(), nn.Conv2d(2, 3, name="c"))

        def wire(self, graph: Any, *inputs: Any) -> Any:
            pairs = zip(self.convs, inputs, self.norms, strict=True)
            return graph.add(self.end, *(graph.add(n, graph.add(c, x)) for c, x, n in pairs))

    x = tuple(rng.normal(size=(5, *shape)) for shape in SHAPES)
    one, norms = nn.BatchNorm(name="n"), (nn.BatchNorm(name="n"), nn.BatchNorm(name="m"))
    shared = Model(Join(one, one), SHAPES, backend=backend, dtype="float64")
    pair = Model(Join(*norms), SHAPES, backend=backend, dtype="float64")
    state = shared.state()
    pair.load({name: state[name.replace("m.", "n.")] for name in pair.state()})
    y, summed = gradients(shared, x)
    expected, single = gradients(pair, x)
    np.testing.assert_allclose(y, expected, rtol=1e-12)
    for which in ("gamma", "beta"):
        np.testing.assert_allclose(
            summed[f"n.{which}"], single[f"n.{which}"] + single[f"m.{which}"], rtol=1e-10
        )


def test_uses_have_names_and_random_numbers_of_their_own():
    drop = nn.Dropout(0.5, name="drop")
    model = Model(nn.Sequential(nn.Linear(64), drop, drop, nn.Linear(1)), (4,), backend="numpy")
    assert [layer.name for layer in model.layers][1:3] == ["drop", "drop_1"]
    assert [*model.parameters] == ["linear3.w", "linear3.b", "linear0.w", "linear0.b"]
    x = np.ones((1, 64), np.float32)
    context = nn.StepContext(training=True, samples=np.arange(1))
    first, second = (model.layers[i].forward(x.copy(), context=context)[0] for i in (1, 2))
    assert (first != second).any()


def test_another_shape_of_parameters_is_refused():
    shared = nn.Linear(5, name="shared")
    with pytest.raises(ValueError, match=r"shared_1: Linear: expected inputs for which shared\.w"):
        Model(nn.Sequential(nn.Linear(3), shared, shared), (4,), backend="numpy")


def test_running_statistics_are_those_of_all_uses(rng):
    model = Model(Twice(nn.BatchNorm(momentum=1.0, name="n")), [(2,), (2,)], dtype="float64")
    x = rng.normal(size=(2, 9, 2))
    model.statistics.begin_step()
    gradients(model, tuple(x))
    model.statistics.fold()
    np.testing.assert_allclose(model.state()["n.running_mean"], x.mean((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(model.state()["n.running_variance"], x.var((0, 1), ddof=1))


"""The weights of the first number of ranks."""
