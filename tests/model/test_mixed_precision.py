"""Models of 16 bits: as good as float32 within their precision, and float32 wherever it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset
from pydtnn.kernels import Backend, create_backend
from pydtnn.layers import (
    GELU,
    AvgPool2d,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
    SiLU,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.model.memory import forecast_memory
from pydtnn.optimizers import OPTIMIZERS, Optimizer, get_optimizer
from pydtnn.parallel.exchange import AllReduce
from pydtnn.saving.weights import load_weights, save_weights
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.small_training import checksums

HALVES = ("bfloat16", "float16")
BOUNDS = {"bfloat16": 2e-2, "float16": 5e-3}
"""Of gradients, in norm: a unit of rounding, 4e-3 and 5e-4, and some ten layers that add to it."""

NUMPY = create_backend("numpy")
IMAGE = (6, 6, 2)


def smooth() -> Sequential:
    """No ReLU and no maximum: they pass a gradient or do not, and rounding decides where."""
    body = [Conv2d(8, 3, padding=1, bias=False), BatchNorm(), Conv2d(8, 3, padding=1)]
    return Sequential(
        *(Conv2d(8, 3, padding=1, bias=False), BatchNorm(), SiLU()),
        Residual(Sequential(*body, BatchNorm()), shortcut=Conv2d(8, 1)),
        *(AvgPool2d(2), GroupNorm(2), GELU(), Dropout(0.2), Conv2d(6, 3, groups=2), SiLU()),
        *(Flatten(), Linear(20), LayerNorm(), SiLU(), Linear(4)),
    )


def with_relu() -> Sequential:
    return Sequential(
        *(Conv2d(8, 3, padding=1, bias=False), BatchNorm(), ReLU()),
        Residual(Sequential(Conv2d(8, 3, padding=1, bias=False), BatchNorm())),
        *(ReLU(), MaxPool2d(2), Flatten(), Linear(4)),
    )


def passes(dtype: str, *, backend: Backend = NUMPY, fuse: bool = True) -> list[np.ndarray]:
    """Outputs in training and inference, and the gradients of inputs and parameters."""
    model = Model(smooth(), IMAGE, backend=backend, dtype=dtype, fuse=fuse, input_gradient=True)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(16, *IMAGE)), rng.normal(size=(16, 4))
    y, saved = model.forward(x, StepContext(training=True, samples=np.arange(16)))
    dx = model.backward(dy, saved)
    y, dx, *gradients = (
        backend.to_numpy(a)
        for a in (y, dx, *(p.grad.reshape(-1) for _, p in sorted(model.parameters.items())))
    )
    return [y, model.predict(x), dx, np.concatenate(gradients)]


@each("fuse", [False, True])
@each("dtype", HALVES)
def test_outputs_and_gradients_are_those_of_float32_within_the_precision(dtype, fuse, backend):
    results = passes(dtype, backend=backend, fuse=fuse)
    for got, want in zip(results, passes("float32"), strict=True):
        assert got.dtype == "float32"
        assert np.linalg.norm(got - want) < BOUNDS[dtype] * np.linalg.norm(want)


def data(samples: int = 256) -> ArrayDataset:
    """Four patterns and noise."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(4, *IMAGE))
    classes = rng.integers(4, size=samples)
    return ArrayDataset(patterns[classes] + 1.5 * rng.normal(size=(samples, *IMAGE)), classes)


def trainer_of(
    dtype: str,
    optimizer: str | Optimizer = "sgd",
    comm: Communicator | None = None,
    backend: Backend = NUMPY,
    **options: Any,
) -> Trainer:
    options.setdefault("exchange", AllReduce(comm or Serial()))
    model = Model(with_relu(), IMAGE, backend=backend, dtype=dtype, bucket_bytes=1 << 10)
    if optimizer == "sgd":
        optimizer = get_optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3)
    return Trainer(model, get_optimizer(optimizer), **options)


def fit(trainer: Trainer, epochs: int = 2) -> list[float]:
    history = trainer.fit(data(), data(64), epochs=epochs, global_batch_size=32)
    return [logs[name] for logs in history for name in ("loss", "val_loss")]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_reaches_the_loss_of_float32(name, dtype):
    options = {"sgd": {"lr": 0.05}, "lars": {"lr": 0.05, "trust": 0.05}, "lamb": {"lr": 0.01}}
    given = options.get(name, {"lr": 0.002})
    losses, expected = (
        fit(trainer_of(d, get_optimizer(name, **given))) for d in (dtype, "float32")
    )
    assert expected[2] < 0.9 * expected[0]  # it learns
    assert losses == pytest.approx(expected, rel=0.05)  # rounding changes the course a little
    assert losses != expected


def test_parameters_and_all_that_updates_them_are_float32():
    model = trainer_of("bfloat16").model
    assert model.dtype.name == "bfloat16"
    for bucket in model.buckets:
        assert bucket.values.dtype == bucket.grads.dtype == "float32"
    assert {str(a.dtype) for a in model.state().values()} == {"float32", "float64"}
    matrices = {name for name, p in model.parameters.items() if name.endswith(".w")}
    for name, p in model.parameters.items():
        assert (p.master.dtype, p.grad.dtype) == ("float32", "float32")
        assert p.value.dtype == ("bfloat16" if name in matrices else "float32")
        assert p.value is p.master or name in matrices


def test_a_forward_pass_begins_by_rounding_the_parameters():
    model = Model(Linear(3), (4,), backend="numpy", dtype="bfloat16")
    w = model.parameters["linear.w"]
    w.master[...] = 1 + 2.0**-10  # between two bfloat16
    x = np.ones((2, 4))
    y, _ = model.forward(x, StepContext(training=False))
    np.testing.assert_array_equal(y, 4)
    np.testing.assert_array_equal(w.master, np.float32(1 + 2.0**-10))
    w.master[...] = 2
    np.testing.assert_array_equal(model.predict(x), 8)


class Share(Layer):
    """A user's layer: one learned factor, in the words of the documentation."""

    def build(self, *shapes: Any) -> Any:
        self.factor = self.parameter("factor", shapes[0][-1:], "ones")
        return shapes[0]

    def forward(self, *xs: Any, context: StepContext) -> Any:
        self.seen = xs[0].dtype
        return xs[0] * self.factor.value, xs[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        self.factor.store_grad((dy * saved).reshape(-1, dy.shape[-1]).sum(axis=0))
        return dy * self.factor.value


@each("dtype", HALVES)
def test_a_layer_that_knows_nothing_of_16_bits_computes_in_float32(dtype):
    model = Model(Sequential(Share(), Linear(3)), (2,), backend="numpy", dtype=dtype)
    first = model.layers[0]
    assert isinstance(first, Share)
    model.parameters["linear1.w"].master[...] = 0.5
    x = np.ones((5000, 2))
    _, saved = model.forward(x, StepContext(training=True))
    model.backward(np.ones((5000, 3)), saved)
    assert first.seen == "float32"
    np.testing.assert_array_equal(first.factor.grad, 7500)  # bfloat16 would stop at 256


@each("dtype", HALVES)
def test_targets_are_not_rounded_to_16_bits(dtype):
    x, y = np.zeros((4, 3)), np.full((4, 1), 1 + 2.0**-12)
    model = Model(Linear(1, bias_initializer="ones"), (3,), backend="numpy", dtype=dtype)
    trainer = Trainer(model, get_optimizer("sgd", lr=0.0), loss="mse", metrics=())
    assert trainer.evaluate(ArrayDataset(x, y)) == {"loss": 2.0**-24}


@each("dtype", HALVES)
def test_weights_go_from_any_dtype_to_any_other(dtype, tmp_path):
    first, second, third = (
        Model(with_relu(), IMAGE, backend="numpy", dtype=d, seed=i)
        for i, d in enumerate(("float32", dtype, "float32"))
    )
    save_weights(first, tmp_path / "a.safetensors")
    load_weights(second, tmp_path / "a.safetensors")
    save_weights(second, tmp_path / "b.safetensors")
    load_weights(third, tmp_path / "b.safetensors")
    assert checksums(third.state()) == checksums(first.state())
    w = second.parameters["conv2d0.w"]
    np.testing.assert_array_equal(w.value, w.master.astype(dtype))


@pytest.mark.threads(2)
def test_ranks_that_synchronise_batch_norm_train_as_one(comm):
    together = fit(trainer_of("bfloat16", comm=comm, sync_batch_norm=True))
    alone = fit(trainer_of("bfloat16", sync_batch_norm=True))
    assert together == pytest.approx(alone, rel=1e-2)  # sums in another order round elsewhere


def test_the_forecast_counts_16_bit_arrays_and_copies():
    def forecast(dtype: str) -> Any:
        net = Sequential(
            Conv2d(8, 3, padding=1), SiLU(), Conv2d(8, 3), SiLU(), Flatten(), Linear(4)
        )
        return forecast_memory(Model(net, IMAGE, backend="cpu", dtype=dtype), 32, slots=1)

    single, half = forecast("float32"), forecast("bfloat16")
    assert half.kept == tuple(n // 2 for n in single.kept)
    assert half.parameters == half.gradients == half.slots == single.parameters
    assert (half.copies, single.copies) == (half.parameters // 2, 0)
    flat = 3 * single.parameters
    assert half.peak - flat - half.copies < 0.6 * (single.peak - flat)
    summary = Model(Linear(64), (64,), backend="numpy", dtype="float16").summary()
    assert "16.2 KiB parameters, 8.12 KiB 16-bit copies, 16.2 KiB gradients" in summary
