"""Networks of `pydtnn.models` in training: on ranks, from a checkpoint, with auxiliary outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend
from pydtnn.layers import Net
from pydtnn.model import Model
from pydtnn.models import cifar_densenet, create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.trainer import Trainer
from tests.each import each

SHAPE = (16, 16, 3)

NETS: dict[str, Callable[[], Net]] = {
    "mobilenet_v2": lambda: create_net("mobilenet_v2", 3, SHAPE, width=0.25),
    "densenet": lambda: cifar_densenet(
        16, 3, SHAPE, growth=4, bottleneck=True, compression=0.5, dropout=0.2
    ),
}


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.normal(size=(12, *SHAPE)), rng.integers(3, size=12), classes=3)


def trainer_of(net: str, comm: Communicator, seed: int = 1) -> Trainer:
    backend = create_backend("cpu", threads=1, tuning="fixed")
    model = Model(NETS[net](), SHAPE, backend=backend, dtype="float64", seed=seed)
    return Trainer(
        model,
        SGD(0.05, momentum=0.9),
        exchange=AllReduce(comm),
        sync_batch_norm=True,
        progress=False,
    )


def trained(trainer: Trainer, epochs: int) -> dict[str, np.ndarray]:
    trainer.fit(data(), epochs=epochs, global_batch_size=12, seed=2)
    return {name: value.copy() for name, value in trainer.model.state().items()}


@pytest.fixture(scope="module")
def serial() -> dict[str, dict[str, np.ndarray]]:
    """What one rank computes in one step, for each network."""
    return {name: trained(trainer_of(name, Serial()), epochs=1) for name in NETS}


@pytest.mark.few(2)
@pytest.mark.threads(2)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", NETS)
def test_two_ranks_take_the_step_of_one(
    comm: Communicator, name: str, serial: dict[str, dict[str, np.ndarray]]
) -> None:
    trainer = trainer_of(name, comm)
    before = {key: value.copy() for key, value in trainer.model.state().items()}
    after = trained(trainer, epochs=1)
    for key, expected in serial[name].items():
        # sums over ranks have another order; dozens of batch norms amplify the rounding
        np.testing.assert_allclose(after[key], expected, rtol=1e-9, atol=1e-9, err_msg=key)
    assert max(np.abs(after[key] - before[key]).max() for key in after) > 1e-3


@each("name", NETS)
def test_a_checkpoint_continues_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    expected = trained(trainer_of(name, Serial()), epochs=2)
    first = trainer_of(name, Serial())
    trained(first, epochs=1)
    save_checkpoint(tmp_path, first)
    second = trainer_of(name, Serial(), seed=3)  # other weights, if they were not loaded
    assert load_checkpoint(tmp_path, second) is not None
    result = trained(second, epochs=2)
    for key, value in expected.items():
        np.testing.assert_array_equal(result[key], value, err_msg=key)


def test_auxiliary_outputs_are_trained_and_can_be_left_out_afterwards() -> None:
    shape, rng = (8, 8, 3), np.random.default_rng(0)
    x, y = rng.normal(size=(8, *shape)).astype("float32"), rng.integers(3, size=8)
    model = Model(create_net("googlenet", 3, shape, auxiliary=True), shape)
    before = {name: value.copy() for name, value in model.state().items()}
    trainer = Trainer(
        model,
        SGD(0.01),
        auxiliary_weights=[0.3, 0.3],
        exchange=AllReduce(Serial()),
        progress=False,
    )
    trainer.fit(ArrayDataset(x, y), global_batch_size=8)
    after = model.state()
    for name in ("stem.conv1.conv.w", "auxiliary1.fc2.w", "auxiliary2.fc2.w", "fc.w"):
        assert (after[name] != before[name]).any(), name

    plain = Model(create_net("googlenet", 3, shape), shape)
    report = plain.load(after, strict=False)
    assert not report.missing
    assert {name.split(".")[0] for name in report.unexpected} == {"auxiliary1", "auxiliary2"}
    # the same layers; 1e-5 is a few dozen times the rounding of float32
    np.testing.assert_allclose(plain.predict(x), model.predict(x)[0], rtol=1e-5, atol=1e-5)
