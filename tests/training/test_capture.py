"""Steps as replays of a CUDA graph: the same numbers as steps that run kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import Model, Trainer
from pydtnn.comm import Communicator, Serial
from pydtnn.comm.nccl import NcclCommunicator, create_nccl
from pydtnn.data import ArrayDataset, Batch
from pydtnn.data.augment import HorizontalFlip, RandomCrop
from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.cuda.graph import WARM_UP
from pydtnn.layers import (
    AdaptiveAvgPool2d,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    Identity,
    Linear,
    Log,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.losses import CategoricalCrossEntropy, MeanSquaredError
from pydtnn.optimizers import SGD, Adam, Nadam, Optimizer
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import SCHEMES, AllReduce, GradientExchange, LocalSGD
from pydtnn.schedules import Cosine
from pydtnn.training.checkpoint import save_checkpoint
from pydtnn.training.nonfinite import NotFiniteError
from tests.each import each
from tests.simulated import Fabric, SimulatedCupy, simulated_backend, why_not
from tests.small_training import Recorder, checksums

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a device")

BATCH, SAMPLES = 4, 21  # five full batches of an epoch and one of a single sample


def network() -> Sequential:
    return Sequential(
        *(Conv2d(4, 3, padding="same"), BatchNorm(), ReLU()),
        Residual(Sequential(Conv2d(4, 3, padding="same"), BatchNorm()), Identity()),
        *(ReLU(), MaxPool2d(2), Dropout(0.3), Conv2d(3, 1), AdaptiveAvgPool2d(1)),
        *(Flatten(), Linear(3, name="head")),
    )


def images() -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (SAMPLES, 6, 6, 3), "uint8")
    return ArrayDataset(x, np.arange(SAMPLES) % 3)


def fit(
    graph: bool,
    *,
    optimizer: Callable[[], Optimizer] = lambda: SGD(
        Cosine(0.05, 12), momentum=0.9, weight_decay=1e-3
    ),
    exchange: GradientExchange | None = None,
    dtype: str = "float32",
    epochs: int = 2,
    **options: Any,
) -> Trainer:
    data, augment = images(), (RandomCrop(1), HorizontalFlip())
    model = Model(network(), data.input_shape, backend=simulated_backend(seed=3), dtype=dtype)
    exchange = exchange or AllReduce(Serial())
    trainer = Trainer(model, optimizer(), exchange=exchange, graph=graph, **options)
    trainer.fit(data, data, epochs=epochs, global_batch_size=BATCH, augment=augment, seed=5)
    return trainer


def equal(a: Trainer, b: Trainer) -> None:
    assert a.history == b.history
    assert a.losses == b.losses
    assert checksums(a.model.state()) == checksums(b.model.state())
    assert checksums(a.optimizer.state()) == checksums(b.optimizer.state())


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"sync_batch_norm": True, "accumulation": 2},
        {"optimizer": lambda: Adam(Cosine(0.01, 12), weight_decay=1e-3)},
        {"optimizer": lambda: Nadam(0.01)},
        {"optimizer": lambda: SGD(0.1, clip_norm=0.5)},
        {"loss": CategoricalCrossEntropy(0.1, class_weights=[1, 2, 0.5])},
        {"loss": MeanSquaredError(), "metrics": ("top2_accuracy", "categorical_hinge")},
    ],
    ids=",".join,
)
def test_captured_steps_give_the_same_bytes(options):
    eager, captured = fit(False, **options), fit(True, **options)
    assert captured.steps.graph == "one CUDA graph"
    assert eager.steps.graph == "no CUDA graph: not asked for"
    equal(eager, captured)


def test_a_replayed_step_neither_allocates_nor_waits():
    def watch(trainer: Trainer) -> None:
        xp = trainer.model.backend.xp
        if trainer.step == WARM_UP + 1:
            seen.append(watching := xp.watched())
            seen.append(watching.__enter__())
        elif trainer.step == WARM_UP + 2:
            seen[0].__exit__(None, None, None)

    seen: list[Any] = []
    fit(True, callbacks=(Recorder(watch),), epochs=1)
    _, step = seen
    assert not step.allocations
    assert not step.uploads
    assert all("feed.py" in wait for wait in step.waits), step.waits  # for what is old
    assert step.launches < 30  # copies of the input, the graph, the losses


@pytest.mark.parametrize("at", [2, WARM_UP + 1])
def test_a_loss_that_is_no_number_is_found_late_and_nothing_is_lost(at):
    """The batch of step `at` has a sample that Log cannot take."""
    rng = np.random.default_rng(0)
    x = 1 + rng.random((SAMPLES, 4))
    states: list[dict[str, str]] = []

    class Ordered(ArrayDataset):
        """Makes one sample bad as soon as it is read in the step in question."""

        steps = 0

        def read(self, indices):
            x, y = super().read(indices)
            Ordered.steps += len(indices) == BATCH  # others are read before the first step
            if Ordered.steps == at and len(indices) == BATCH:
                x[-1] = -1e3
            return x, y

    def remember(trainer: Trainer) -> None:
        states.append(checksums(trainer.model.state()))

    net = Sequential(Log(name="log"), Linear(3, name="head"))
    model = Model(net, (4,), backend=simulated_backend(), dtype="float64")
    trainer = Trainer(
        model, SGD(0.1, momentum=0.9), exchange=AllReduce(Serial()), callbacks=[Recorder(remember)]
    )
    data = Ordered(x, np.arange(SAMPLES) % 3)
    message = rf"not finite at epoch 1, step {at}: first in the output of log"
    with pytest.raises(NotFiniteError, match=message):
        trainer.fit(data, epochs=1, global_batch_size=BATCH, loader_threads=0)
    assert trainer.optimizer.iterations == at - 1
    assert checksums(model.state()) == states[at - 2]


class Own(SGD):
    """Says nothing about graphs."""


class Reads(MeanSquaredError):
    """Looks at its loss on the host."""

    def compute(self, backend, y, target, scale, out):
        return float(super().compute(backend, y, target, scale, out))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optimizer": lambda: Own(0.05)}, "Own does not say that it is `capturable`"),
        ({"exchange": LocalSGD(Serial())}, "the steps of LocalSGD are not all alike"),
        ({"loss": Reads()}, r"test_capture.py:\d+: "),
    ],
)
def test_what_cannot_be_captured_says_why_and_trains_alike(options, reason):
    eager, captured = fit(False, **options), fit(True, **options)
    assert captured.steps.graph.startswith("no CUDA graph: ")
    assert captured.steps.graph != eager.steps.graph
    assert pytest.importorskip("re").search(reason, captured.steps.graph)
    equal(eager, captured)


def test_steps_under_way_are_awaited_before_the_state_is_saved():
    """A checkpoint in the middle of an epoch holds the sums of all steps that it counts."""
    states: dict[bool, list[Any]] = {False: [], True: []}
    for graph, found in states.items():

        def save(trainer: Trainer, found: list[Any] = found) -> None:
            if trainer.step == WARM_UP + 2:
                state = trainer.state()
                found += [state["step"], state["totals"].tolist(), checksums(trainer.model.state())]

        fit(graph, callbacks=(Recorder(save),), epochs=1)
    assert states[True] == states[False]
    assert states[True][0] == WARM_UP + 2


@each("graph", [False, True])
def test_a_trainer_whose_optimizer_another_has_taken_is_refused(graph, tmp_path):
    """Its graph would write to the state that it had, and its checkpoint hold another's."""
    first = fit(graph)
    second = Trainer(first.model, first.optimizer, exchange=AllReduce(Serial()), graph=graph)
    before = checksums(first.model.state())
    words = "Trainer: SGD was passed to another trainer, which reset its state; "
    data = images()
    for call in (
        lambda: first.fit(data, epochs=3, global_batch_size=BATCH),
        lambda: first.train_step(Batch(data.x, data.y, np.arange(SAMPLES), 0, SAMPLES, ())),
        lambda: save_checkpoint(tmp_path, first),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert checksums(first.model.state()) == before
    assert not list(tmp_path.iterdir())
    second.fit(data, epochs=2, global_batch_size=BATCH, seed=5)
    assert second.steps.graph.startswith("one CUDA graph") == graph


def over_nccl(comm: Communicator) -> Communicator:
    """The rank's GPU in a fabric that all ranks share, which are threads."""
    fabric = Fabric()
    if comm.rank == 0:
        FABRICS[id(fabric)] = fabric
    fabric = FABRICS[comm.gather_object(id(fabric))[0]]
    return create_nccl(comm, SimulatedCupy(fabric, seed=comm.rank))


FABRICS: dict[int, Fabric] = {}


@pytest.mark.threads(3, through=over_nccl)
@each(
    ("scheme", "sync"),
    [
        (partial(AllReduce, overlap=False), False),
        (partial(AllReduce, sums=partial(ExactSums, shards=3)), False),
        *((scheme, False) for scheme in SCHEMES.values() if scheme.static),  # type: ignore
        (AllReduce, True),
    ],
)
def test_ranks_replay_their_messages_too(comm, scheme, sync):
    """The sums of NCCL are part of the graph, and equal those of the host but for rounding.

    Steps without a graph give the same bytes.
    """
    data = images()

    def train(comm: Communicator, backend: Backend, graph: bool = True) -> tuple[Trainer, int]:
        before = comm.traffic.bytes  # which a device's communicator shares with that of the host
        model = Model(network(), data.input_shape, backend=backend, dtype="float64")
        optimizer = SGD(Cosine(0.05, 12), momentum=0.9)
        trainer = Trainer(
            model, optimizer, exchange=scheme(comm), sync_batch_norm=sync, graph=graph
        )
        trainer.fit(data, data, epochs=2, global_batch_size=6, augment=(RandomCrop(1),), seed=5)
        return trainer, comm.traffic.bytes - before

    assert isinstance(comm, NcclCommunicator)
    captured, sent = train(comm, simulated_backend(comm.device.xp))
    equal(train(comm, simulated_backend(comm.device.xp), graph=False)[0], captured)
    on_host, expected = train(comm.inner, create_backend("numpy"))
    assert captured.steps.graph == "one CUDA graph"
    # sums of doubles that batch norm or shards share have second parts on the host alone
    in_parts = captured.sync_batch_norm or captured.exchange.sums.shards is not None
    assert sent < expected if in_parts else sent == expected
    assert len({str(state) for state in comm.gather_object(checksums(captured.model.state()))}) == 1
    for name, value in on_host.model.state().items():
        np.testing.assert_allclose(captured.model.state()[name], value, rtol=1e-9, atol=1e-9)
