"""Loss scaling: gradients that would vanish do not, steps that overflow are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.comm import Communicator, Serial
from pydtnn.kernels import Backend, create_backend
from pydtnn.layers import Linear, Sequential, SiLU, StepContext
from pydtnn.optimizers import SGD
from pydtnn.optimizers.loss_scale import LossScale
from pydtnn.parallel.schemes import AllReduce, GradientExchange, ShardedOptimizer, ShardedParameters
from pydtnn.parallel.schemes.stale import StaleGradients
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from tests.each import each
from tests.small_training import Recorder, checksums

NUMPY = create_backend("numpy")


def step(scale: LossScale, *gradients: Any) -> None:
    """Take gradients of a scaled loss as they arrive, and adapt."""
    scale.loss(1.0)
    scale.unscale([scale.backend.asarray(np.array(g, "float32")) for g in gradients])
    scale.adjust()


def test_the_loss_is_multiplied_and_gradients_are_divided(backend):
    scale = LossScale(backend, initial=8)
    assert float(scale.loss(0.25)) == 2.0
    gradients = [backend.asarray(np.array(g, "float32")) for g in ([8, -4], [1])]
    scale.unscale(gradients)
    assert [backend.to_numpy(g).tolist() for g in gradients] == [[1.0, -0.5], [0.125]]
    assert scale.passed


def test_the_scale_shrinks_at_once_and_grows_after_many_good_steps(backend):
    scale = LossScale(backend, initial=8)
    scale.interval, scale.growth = 3, 4.0
    scales, flags = [], []
    for gradient in (1, np.inf, 1, 1, np.nan, 1, 1, 1, 1):
        step(scale, [gradient])
        scales.append(scale.state()["scale"])
        flags.append(float(scale.go[0]))
    assert scales == [8, 4, 4, 4, 2, 2, 2, 8, 8]
    assert flags == [1, 0, 1, 1, 0, 1, 1, 1, 1]


def test_a_scale_that_has_shrunk_to_nothing_is_told():
    scale = LossScale(NUMPY, initial=2.0**-20)
    told = []
    for _ in range(6):
        step(scale, [np.nan])
        told.append(scale.lost)
    assert told == [False] * 4 + [True] * 2


def gradients(backend: Backend, dtype: str, factor: float, scale: LossScale | None) -> np.ndarray:
    """Gradients of a small net whose loss is multiplied by `factor`."""
    net = Sequential(Linear(16), SiLU(), Linear(16), SiLU(), Linear(4))
    model = Model(net, (16,), backend=backend, dtype=dtype)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(32, 16)), rng.normal(size=(32, 4))
    y, saved = model.forward(x.astype(model.dtype), StepContext(training=True))
    wanted = factor if scale is None else scale.loss(factor)
    model.backward((dy * wanted).astype(y.dtype), saved)
    if scale is not None:
        scale.unscale([buffer.grads for buffer in model.buffers])
    return np.concatenate([p.grad.reshape(-1) for p in model.parameters.values()])


@each("name", ["numpy", "cpu"])
def test_small_gradients_of_float16_survive_with_a_scale_only(name):
    backend = create_backend(name, threads=1)
    exact = gradients(backend, "float64", 1e-8, None)  # below 6e-8 a float16 is 0

    def error(got: np.ndarray) -> float:
        return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))

    scale = LossScale(backend)
    assert error(gradients(backend, "float16", 1e-8, scale)) < 5e-3
    assert scale.passed
    assert error(gradients(backend, "float16", 1e-8, None)) > 0.5
    assert error(gradients(backend, "bfloat16", 1e-8, None)) < 2e-2  # has the range of float32


def trainer_of(
    comm: Communicator | None = None,
    initial: float = 2.0**16,
    scheme: type[GradientExchange] = AllReduce,
    backend: Backend = NUMPY,
    **options: Any,
) -> Trainer:
    net = Sequential(Linear(16), SiLU(), Linear(3))
    model = Model(net, (8,), backend=backend, dtype="float16")
    optimizer = SGD(0.1, momentum=0.9, **options)
    trainer = Trainer(model, optimizer, exchange=scheme(comm or Serial()))
    assert trainer.loss_scale is not None
    trainer.loss_scale.scale[...] = initial
    return trainer


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    classes = rng.integers(3, size=96)
    return ArrayDataset(rng.normal(size=(3, 8))[classes] + rng.normal(size=(96, 8)), classes)


def fit(trainer: Trainer, epochs: int = 1) -> list[float]:
    history = trainer.fit(data(), epochs=epochs, global_batch_size=24)
    return [logs["loss"] for logs in history]


@pytest.mark.threads(1, 3)
@each("scheme", [AllReduce, ShardedOptimizer, ShardedParameters])
@each("options", [{}, {"clip_norm": 0.5}])
def test_steps_that_overflow_are_left_out_by_all_ranks(comm, scheme, options):
    trainer = trainer_of(comm, 2.0**28, scheme, **options)
    model, before, moved = trainer.model, {}, []

    def on_step(trainer: Trainer) -> None:
        with trainer.averaged():
            state = checksums(trainer.model.state())
        moved.append(state != before)
        before.update(state)

    before.update(checksums(model.state()))
    trainer.callbacks.append(Recorder(on_step))
    losses = fit(trainer, epochs=5)
    skipped = moved.index(True)
    assert 3 < skipped < 16
    assert all(moved[skipped:])
    assert trainer.loss_scale.state() == {"scale": 2.0 ** (28 - skipped), "good": 20.0 - skipped}
    assert trainer.optimizer.iterations == 20  # the schedule goes on
    assert losses[-1] < 0.8 * losses[0]


def test_a_scaled_training_is_that_of_float32_which_has_no_scale(backend):
    model = Model(Sequential(Linear(16), SiLU(), Linear(3)), (8,), backend="numpy")
    plain = Trainer(model, SGD(0.1, momentum=0.9), exchange=AllReduce(Serial()))
    assert plain.loss_scale is None
    assert fit(trainer_of(backend=backend), 3) == pytest.approx(fit(plain, 3), rel=1e-2)


def test_a_checkpoint_holds_the_scale(tmp_path):
    whole, first = trainer_of(initial=2.0**28), trainer_of(initial=2.0**28)
    fit(whole, 2)
    fit(first, 1)
    save_checkpoint(tmp_path, first)
    second = trainer_of()
    assert load_checkpoint(tmp_path, second)
    fit(second, 2)
    assert second.loss_scale.state() == whole.loss_scale.state()
    assert checksums(second.model.state()) == checksums(whole.model.state())


def test_schemes_that_keep_gradients_are_refused():
    with pytest.raises(ValueError, match="StaleGradients keeps gradients.*use bfloat16"):
        trainer_of(scheme=StaleGradients)
