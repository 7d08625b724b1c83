"""ResNet-20 with equal weights: logits, gradients and five steps of SGD equal PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import create_communicator
from pydtnn.data import Batch
from pydtnn.kernels import Backend
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.trainer import Trainer
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

SHAPE = (32, 32, 3)


@pytest.fixture
def resnet(backend: Backend) -> Model:
    return Model(create_net("resnet20", 10, SHAPE), SHAPE, backend=backend, dtype="float64")


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, *SHAPE)), rng.integers(10, size=8)


def test_logits_and_gradients_are_equal(
    resnet: Model, batch: tuple[np.ndarray, np.ndarray]
) -> None:
    from benchmarks.common.torch_twin import Twin, to_ours, to_torch

    x, _ = batch
    twin = Twin(resnet)
    theirs = twin(to_torch(x))
    y, residuals = resnet.forward(resnet.backend.asarray(x), StepContext(training=True))
    np.testing.assert_allclose(to_host(y), to_ours(theirs), rtol=1e-8, atol=1e-10)
    dy = np.random.default_rng(1).normal(size=y.shape)
    theirs.backward(to_torch(dy))
    resnet.backward(resnet.backend.asarray(dy), residuals)
    for name, gradient in twin.gradients().items():
        error = (
            np.abs(to_host(resnet.parameters[name].grad) - gradient).max() / np.abs(gradient).max()
        )
        assert error < 1e-8, f"{name}: {error}"


def test_the_loss_over_five_steps_is_equal(
    resnet: Model, batch: tuple[np.ndarray, np.ndarray]
) -> None:
    from benchmarks.common.torch_twin import Twin, to_torch

    x, target = batch
    twin = Twin(resnet)
    decays = [t for t in twin.parameters() if t.ndim > 1]  # biases and norms do not
    others = [t for t in twin.parameters() if t.ndim == 1]
    groups = [{"params": decays, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(twin(to_torch(x)), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    trainer = Trainer(
        resnet,
        SGD(0.05, momentum=0.9, weight_decay=1e-3),
        metrics=(),
        exchange=AllReduce(create_communicator("serial")),
    )
    trainer.exchange.start(resnet.buckets)
    step = Batch(x, target, np.arange(8), index=0, total=8)
    losses = [trainer.train_step(step).means()["loss"] for _ in range(5)]
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-8)
