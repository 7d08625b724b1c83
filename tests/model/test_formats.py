"""Formats of fewer bits in training: what is rounded, and what does not depend on it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pydtnn import Mesh
from pydtnn import layers as nn
from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend
from pydtnn.kernels.number_format import Rounding
from pydtnn.model import Model
from pydtnn.model.formats import Formats, signs
from pydtnn.model.memory import forecast_memory
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import ShardedOptimizer
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.kernels.test_rounding import HADAMARD, nvfp4
from tests.small_training import checksums

ALL = "activations=e4m3fn,gradients=e5m2,weights=e2m1:32"
RANDOM = "activations=e4m3fn:stochastic,gradients=e5m2:8:stochastic,weights=e4m3:channel"
NVFP4 = "nvfp4,float32=last"
CONTEXT = nn.StepContext(training=True, seed=3, epoch=2, samples=np.arange(5) + 7)
IMAGE = (8, 8, 3)


def rounded(x: np.ndarray, text: str, axis: int = -1) -> np.ndarray:
    out = np.empty_like(x)
    Rounding.parse(text).apply(create_backend("numpy"), x, out=out, axis=axis)
    return out


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(8, 3, padding=1, bias=False), nn.BatchNorm(), nn.ReLU()),
        *(nn.Conv2d(8, 3, padding=1, bias=False), nn.BatchNorm()),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(16), nn.LayerNorm(), nn.GELU(), nn.Linear(4)),
    )


def passes(model: Model, x: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    """The output of forward and all gradients of backward."""
    y, saved = model.forward(x, CONTEXT)
    model.backward(dy, saved)
    return [y, *(p.grad.copy() for p in model.parameters.values())]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


@each("backend", ["cpu", "numpy"])
def test_factors_of_products_are_rounded_and_nothing_else(backend):
    model = Model(nn.Linear(6), (40,), backend=backend, formats=ALL, input_gradient=True)
    x, dy = draw(5, 40), draw(5, 6) / 1000
    y, saved = model.forward(x, CONTEXT)
    dx = model.backward(dy, saved)
    w, b = (model.parameters[f"linear.{name}"] for name in "wb")
    factors = rounded(x, "e4m3fn"), rounded(w.master, "e2m1:32", axis=0), rounded(dy, "e5m2")
    a, v, g = (f.astype("float64") for f in factors)
    assert not np.array_equal(v, w.master)
    for found, exact in (
        (y, a @ v.T + b.master),
        (dx, g @ v),
        (w.grad, g.T @ a),
        (b.grad, g.sum(0)),
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5 * abs(exact).max())


def transformed(x: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Each whole 16 rows times the Hadamard matrix with the signs of the context's seed."""
    h, y = HADAMARD * signs(CONTEXT.seed), x.astype("float64")
    for i in range(0, len(x) // 16 * 16, 16):
        y[i : i + 16] = (h.T if inverse else h) @ x[i : i + 16]
    return y.astype("float32")


@each("products", ["apart", "hadamard"])
@each("weights", ["e2m1:16x16:e4m3fn", "e2m1:16:e4m3fn"])
def test_each_product_rounds_its_factors_along_the_axis_that_it_sums_over(products, weights):
    """Beside NumPy, with the rounding of another program; the last 5 rows are not transformed."""
    parts = f"weights={weights},products={products},gradients=e2m1:16:e4m3fn,float32="
    model = Model(nn.Linear(24), (40,), formats=f"nvfp4,{parts}", input_gradient=True)
    x, dy = draw(37, 40), draw(37, 24) / 1000
    context = nn.StepContext(training=True, seed=CONTEXT.seed, samples=np.arange(37))
    y, saved = model.forward(x, context)
    dx = model.backward(dy, saved)
    w, b = (model.parameters[f"linear.{name}"] for name in "wb")
    turn = transformed if products == "hadamard" else lambda a, inverse=False: a
    v, g = (turn(nvfp4(turn(a), 16, 1), inverse=True).astype("float64") for a in (x, dy))
    height = 16 if "16x16" in weights else 1
    forward, backward = nvfp4(w.master, height, 16), nvfp4(w.master, 16, 17 - 16 // height)
    for found, exact in (
        (y, nvfp4(x, 1, 16).astype("float64") @ forward.T),
        (dx, nvfp4(dy, 1, 16).astype("float64") @ backward),
        (w.grad, g.T @ v),
        (b.grad, g.sum(0)),
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5 * abs(exact).max())


def test_gradients_that_are_rounded_at_random_have_the_expected_value_of_float32():
    formats = "gradients=e2m1:16:e4m3fn:stochastic,products=hadamard"
    model = Model(nn.Linear(16), (8,), formats=formats, input_gradient=True)
    x, dy, w, steps = draw(32, 8), draw(32, 16), model.parameters["linear.w"], 400
    dw, dx = [], []
    for epoch in range(steps):
        context = nn.StepContext(training=True, epoch=epoch, samples=np.arange(32))
        _, saved = model.forward(x, context)
        dx.append(model.backward(dy, saved))
        dw.append(w.grad.copy())
    for found, exact in ((dw, dy.T @ x), (dx, dy @ w.master)):
        error, once = (np.linalg.norm(a - exact) for a in (np.mean(found, 0), found[0]))
        assert error < 2.5 * once / steps**0.5
        assert once > 0.02 * np.linalg.norm(exact)


def test_layers_that_remain_in_float32_are_found_by_place_or_name():
    def rounded_layers(text: str) -> list[str]:
        model = Model(network(), IMAGE, formats=f"nvfp4,float32={text}")
        return [name for name, p in model.parameters.items() if p.value is not p.master][::-1]

    first, second, third, fourth = rounded_layers("")
    assert rounded_layers("first+last2") == [second]
    assert rounded_layers(f"linear*+{first.removesuffix('.w')}") == [second]
    assert [name.rstrip(".w0123456789") for name in (third, fourth)] == ["linear", "linear"]
    assert Formats.parse("nvfp4").layers_in_float32(["a", "b", "c"]) == {"a", "c"}
    assert Formats.parse("nvfp4,products=once").products is None
    with pytest.raises(ValueError, match="formats: float32: .*'lineal'"):
        rounded_layers("lineal")
    net = nn.Sequential(nn.ConvTranspose2d(4, 3), nn.Flatten(), nn.Linear(2))
    with pytest.raises(ValueError, match=r"\(ConvTranspose2d\) does not compute its"):
        Model(net, IMAGE, formats="nvfp4,float32=last")


@each("formats", [ALL, RANDOM, NVFP4])
def test_fusion_recomputation_and_repetition_do_not_change_it(formats):
    """Fused norms sum in another order, which may round an element to a neighbour."""
    x, dy = draw(5, *IMAGE), draw(5, 4)
    first = Model(network(), IMAGE, formats=formats)
    expected = passes(first, x, dy)
    for other in (first, Model(network(), IMAGE, formats=formats, recompute=3)):
        for found, array in zip(passes(other, x, dy), expected, strict=True):
            np.testing.assert_array_equal(found, array)
    unfused = passes(Model(network(), IMAGE, formats=formats, fuse=False), x, dy)
    for found, array in zip(unfused, expected, strict=True):
        assert np.linalg.norm(found - array) < 0.1 * np.linalg.norm(array) + 1e-5


def test_evaluation_rounds_to_nearest_and_folds_norms_into_rounded_filters():
    x, formats = draw(5, *IMAGE), "weights=e2m1:8,activations=e5m10:stochastic"
    models = [Model(network(), IMAGE, formats=formats, fuse=fuse) for fuse in (True, False)]
    evaluation = nn.StepContext(training=False)
    fused, plain = (model.forward(x, evaluation, keep=False)[0] for model in models)
    np.testing.assert_allclose(fused, plain, rtol=0, atol=0.02)
    plain_memory, found = (
        forecast_memory(Model(network(), IMAGE, formats=f), 32) for f in (None, ALL)
    )
    assert found.copies == found.parameters
    assert found.peak > plain_memory.peak
    float32 = Model(network(), IMAGE).forward(x, evaluation, keep=False)[0]
    assert abs(float32 - plain).max() > 0.05


def test_random_rounding_depends_on_samples_and_epoch_only():
    x = draw(5, *IMAGE)
    model = Model(network(), IMAGE, formats="activations=e2m1:stochastic:none")
    whole, _ = model.forward(x, nn.StepContext(training=True, samples=np.arange(5)))
    again, _ = model.forward(x, nn.StepContext(training=True, samples=np.arange(5)))
    later, _ = model.forward(x, nn.StepContext(training=True, epoch=1, samples=np.arange(5)))
    np.testing.assert_array_equal(whole, again)
    assert not np.array_equal(whole, later)


@pytest.mark.threads(3)
@each("formats", [RANDOM, NVFP4])
def test_exact_training_gives_the_same_bytes_for_any_number_of_ranks(comm, formats):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, *IMAGE)).astype("float32"), rng.integers(0, 4, 48)

    def train(comm: Communicator) -> tuple[dict[str, str], float]:
        model = Model(network(), IMAGE, formats=formats, backend=create_backend(threads=1))
        exchange = AllReduce(comm, sums=partial(ExactSums, shards=4))
        trainer = Trainer(model, SGD(0.1), loss="cross_entropy", exchange=exchange)
        history = trainer.fit(ArrayDataset(x, y), global_batch_size=16, epochs=2)
        return checksums(model.state()), history[-1]["loss"]

    alone = train(Serial())
    assert train(comm) == alone
    assert alone[1] < 1.4


@pytest.mark.long
@pytest.mark.threads(2)
def test_pipelines_in_halves_give_the_same_bytes_and_count_layers_of_all_stages(comm):
    def train(schedule: str) -> list[str]:
        net = nn.Sequential(*(nn.Linear(20) for _ in range(4)))
        mesh = Mesh(comm, pipeline=2)
        model = Model(net, (20,), formats="nvfp4", mesh=mesh, pipeline_schedule=schedule)
        assert sum(p.value is p.master for p in model.parameters.values() if p.working) == 0
        assert sum(p.working for p in model.parameters.values()) == 1
        exchange = AllReduce(mesh.data)
        trainer = Trainer(model, SGD(0.1), exchange=exchange, loss="mse", micro_batches=2)
        trainer.fit(ArrayDataset(draw(32, 20), draw(32, 20)), global_batch_size=16, epochs=2)
        return [*checksums({n: p.master for n, p in model.parameters.items()}).values()]

    assert train("zb_h1") == train("1f1b")


@each(
    ("formats", "dtype", "reason"),
    [
        (ALL, "bfloat16", "formats require dtype float32, got bfloat16"),
        (ALL, "float64", "formats require dtype float32, got float64"),
        ("biases=e4m3", "float32", "expected each of activations, weights, gradients"),
        ("weights=e4m3,weights=e5m2", "float32", "at most once"),
        ("weights=e4m3:stochastic", "float32", "round them to nearest"),
        ("gradients=float8", "float32", "formats: gradients: expected a format such as"),
        ("", "float32", "expected each of"),
        ("mxfp8,weights=e2m1", "float32", "or mxfp4 or nvfp4 first, got 'mxfp8"),
        ("nvfp4,products=none", "float32", "products are apart or hadamard, or not given"),
        ("messages=e4m3", "float32", "for messages, use a compressor such as int8"),
    ],
)
def test_what_cannot_be_rounded_is_refused(formats, dtype, reason):
    with pytest.raises(ValueError, match=reason):
        Model(nn.Linear(2), (3,), dtype=dtype, formats=formats)


@pytest.mark.threads(2)
def test_state_of_which_ranks_have_parts_is_refused(comm):
    model = Model(network(), IMAGE, formats="optimizer=e4m3")
    with pytest.raises(ValueError, match="requires whole arrays on each rank"):
        Trainer(model, SGD(0.1), loss="cross_entropy", exchange=ShardedOptimizer(comm))


def test_optimizer_state_is_rounded_after_each_update_and_repeats():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, *IMAGE)).astype("float32"), rng.integers(0, 4, 48)

    def train(formats: str | None) -> Trainer:
        model = Model(network(), IMAGE, formats=formats)
        trainer = Trainer(model, SGD(0.1, momentum=0.9), loss="cross_entropy")
        trainer.fit(ArrayDataset(x, y), global_batch_size=16, epochs=2)
        return trainer

    first, second, plain = map(train, ["optimizer=e4m3:8:stochastic"] * 2 + [None])
    state = first.optimizer.state()
    for name in (name for name in state if name.startswith("velocity/")):
        np.testing.assert_array_equal(state[name], second.optimizer.state()[name])
        rest = rounded(state[name], "e4m3:8")
        np.testing.assert_array_equal(state[name], rest)
        assert not np.array_equal(plain.optimizer.state()[name], rest)
    assert checksums(first.model.state()) == checksums(second.model.state())
