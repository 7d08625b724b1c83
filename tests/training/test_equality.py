"""Ranks that must be equal: what is found, what is named, and what is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import EMA, Callback, CheckEqual, Checkpointer
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD, Adam, Optimizer
from pydtnn.parallel.compression import PowerSGD
from pydtnn.parallel.schemes import AllReduce, LocalSGD, ShardedOptimizer, StaleGradients
from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.utils.errors import AgreedError
from tests.comm.devices import TRANSPORTS, device_of, reference_on
from tests.each import each
from tests.small_mesh import mesh_fit, mesh_trainer, on_ranks
from tests.small_training import Recorder

Find = Callable[[Trainer], Array]


class Flip(Callback):
    """Change one bit of one array on one rank after a step."""

    def __init__(self, rank: int, step: int, find: Find, bit: int = 20) -> None:
        self.rank, self.step, self.find, self.bit = rank, step, find, bit

    def on_step_end(self, trainer: Any) -> None:
        if (trainer.comm.rank, trainer.optimizer.iterations) == (self.rank, self.step):
            array = self.find(trainer).reshape(-1)
            array.view(f"u{array.itemsize}")[1] ^= 1 << self.bit


def parameter(name: str) -> Find:
    return lambda trainer: trainer.model.parameters[name].master


HEAD = parameter("head.b")


def slot(name: str) -> Find:
    def find(trainer: Trainer) -> Array:
        for slot, entry, _, values in trainer.optimizer.stored():
            if f"{slot}/{entry.name}" == name:
                return values
        raise KeyError(name)

    return find


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.normal(size=(16, 5, 5, 2)), rng.integers(0, 3, 16))


def trainer_of(
    comm: Communicator,
    *callbacks: Callback,
    optimizer: Callable[[], Optimizer] = lambda: SGD(0.05, momentum=0.9),
    scheme: Any = AllReduce,
    sums: Any = None,
    backend: Any = "cpu",
    **options: Any,
) -> Trainer:
    net = Sequential(Conv2d(4, 3), BatchNorm(), ReLU(), Flatten(), Linear(3, name="head"))
    return Trainer(
        Model(net, (5, 5, 2), backend=backend),
        optimizer(),
        exchange=scheme(comm, **({} if sums is None else {"sums": sums})),
        callbacks=callbacks,
        progress=False,
        **options,
    )


def steps(trainer: Trainer, number: int, **options: Any) -> None:
    trainer.fit(data(), epochs=number // 2, global_batch_size=8, **options)


def found_by(ranks: int, run: Callable[[Communicator], Any]) -> AgreedError:
    """Return the error that all ranks raise."""
    errors: list[str] = []

    def rank(comm: Communicator) -> None:
        try:
            run(comm)
        except AgreedError as error:
            errors.append(str(error))
            raise

    with pytest.raises(AgreedError) as raised:
        run_threads(ranks, rank)
    assert errors == [str(raised.value)] * ranks
    return raised.value


@each(("ranks", "given"), [(2, "different ones"), (4, "another one on rank 1")])
def test_a_flipped_bit_of_a_parameter_is_named_with_rank_and_step(ranks, given):
    flip = Flip(1, 50, parameter("conv2d0.w"))
    error = found_by(ranks, lambda comm: steps(trainer_of(comm, flip, CheckEqual(40)), 80))
    assert re.search(
        f"^CheckEqual: expected the same parameter conv2d0.w on all ranks, got {given} since one "
        "of the steps 41 to 80; .* continue from a checkpoint of step 40 or an earlier one$",
        str(error),
    )
    assert error.ranks == ((1,) if ranks == 4 else ())


@each(
    ("name", "find", "options"),
    [
        ("velocity of head.w", slot("velocity/head.w"), {}),
        ("v of head.w", slot("v/head.w"), {"optimizer": lambda: Adam(0.01)}),
        (
            "running_mean of batchnorm1",
            lambda t: t.model.statistics.statistics[0].mean,
            {"sync_batch_norm": True},
        ),
        ("parameter conv2d0.w", parameter("conv2d0.w"), {"sums": PowerSGD}),
        ("parameter conv2d0.w", parameter("conv2d0.w"), {"scheme": StaleGradients}),
    ],
)
def test_the_first_array_that_differs_is_named(name, find, options, tmp_path):
    """After a further call of `fit`, at the end of training or where a checkpoint is saved."""

    def run(comm: Communicator) -> None:
        saver = Checkpointer(tmp_path, every_epochs=2, keep=9)
        trainer = trainer_of(comm, Flip(1, 6, find), saver, **options)
        steps(trainer, 4)
        trainer.model.freeze("batchnorm1") if not options else None
        steps(trainer, 6)

    error = found_by(3, run)
    assert f"expected the same {name} on all ranks, got another one on rank 1 " in str(error)
    assert str(error).endswith("continue from a checkpoint of step 4 or an earlier one")
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-00000004"]


def test_a_state_that_differs_before_the_first_step_is_found():
    def run(comm: Communicator) -> None:
        trainer = trainer_of(comm)
        if comm.rank == 2:
            slot("velocity/head.b")(trainer)[0] = np.nan
        steps(trainer, 2)

    error = str(found_by(3, run))
    assert "velocity of head.b on all ranks, got another one on rank 2 when training sta" in error
    assert error.endswith("start again")


def test_a_learning_rate_of_one_rank_is_named_before_the_parameters_that_it_changes():
    def run(comm: Communicator) -> None:
        def course(step: int) -> float:
            return 0.1 + 0.1 * (comm.rank == 1 and step >= 4)

        steps(trainer_of(comm, optimizer=lambda: SGD(course), check_equal=10), 20)

    error = str(found_by(3, run))
    assert "the same number of updates or learning rate on all ranks, got another one on" in error
    assert "further arrays differ" in error


@each(
    "options",
    [
        {"scheme": ShardedOptimizer},
        {"sums": PowerSGD},
        {"sync_batch_norm": True, "optimizer": lambda: Adam(0.01)},
    ],
)
def test_equal_ranks_train_as_without_the_check(options):
    def run(comm: Communicator, every: int) -> tuple[bytes, ...]:
        trainer = trainer_of(comm, EMA(0.9), check_equal=every, **options)
        steps(trainer, 6)
        return tuple(np.asarray(value).tobytes() for value in trainer.model.state().values())

    assert run_threads(3, lambda comm: run(comm, 2)) == run_threads(3, lambda comm: run(comm, 0))


@each(
    ("axes", "flipped", "place", "where"),
    [
        ({"data": 2, "filter": 2}, 3, "conv2d0.w", "ranks"),  # each half on two ranks
        ({"data": 1, "filter": 2}, 1, "head.w", ""),  # no other rank has this part
        ({"spatial": 4}, 2, "conv2d0.w", "all ranks, got another one"),
        ({"data": 2, "pipeline": 2}, 3, "head.w", "ranks"),
    ],
)
def test_ranks_of_a_mesh_compare_what_they_have_in_common(axes, flipped, place, where):
    def run(comm: Communicator) -> None:
        flip, norm = Flip(flipped, 2, parameter(place)), "pipeline" not in axes
        mesh_fit(mesh_trainer(comm, axes, flip, norm=norm), epochs=2)

    if not where:
        on_ranks(axes, run)
        return
    error = str(found_by(4, run))
    assert f"expected the same parameter {place} on {where}" in error
    assert str(flipped) in error


def test_ranks_that_differ_by_design_are_compared_on_request_only_which_is_refused():
    run_threads(2, lambda comm: steps(trainer_of(comm, scheme=LocalSGD), 4))
    run_threads(2, lambda comm: steps(trainer_of(comm, Flip(1, 2, HEAD), check_equal=0), 4))
    sentence = "check_equal requires the same parameters on all ranks, got LocalSGD, with differ"
    with pytest.raises(ValueError, match=sentence):
        trainer_of(Serial(), scheme=LocalSGD, check_equal=100)
    error = found_by(2, lambda c: steps(trainer_of(c, CheckEqual(), scheme=LocalSGD), 2))
    assert "CheckEqual requires the same parameters on all ranks" in str(error)
    with pytest.raises(ValueError, match="check_equal must be at least 0, got -1"):
        trainer_of(Serial(), check_equal=-1)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        CheckEqual(0)


def test_a_loss_that_is_not_finite_because_ranks_differ_is_reported_as_a_difference():
    class Break(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if (trainer.comm.rank, trainer.optimizer.iterations) == (2, 5):
                trainer.model.parameters["head.b"].master[1] = np.nan

    def run(comm: Communicator, every: int) -> None:
        steps(trainer_of(comm, Break(), check_equal=every), 20)

    error = found_by(3, lambda comm: run(comm, 100))
    assert "parameter head.b on all ranks, got another one on rank 2 since " in str(error)
    assert "the loss is not finite" in str(found_by(3, lambda comm: run(comm, 0)))


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_with_arrays_on_a_device_are_compared_on_the_host(transport):
    """Whatever carries their messages."""

    def rank(comm: Communicator) -> None:
        def change(trainer: Any) -> None:
            if (trainer.comm.rank, trainer.optimizer.iterations) == (1, 7):
                trainer.model.parameters["head.w"].master[...] += 1

        xp = device_of(comm)
        own = Recorder(on_step=change), CheckEqual(5)
        trainer = trainer_of(TRANSPORTS[transport](comm, xp), *own, backend=reference_on(xp))
        assert isinstance(trainer.model.buckets[0].values, xp.ndarray)
        steps(trainer, 20)

    with pytest.raises(AgreedError, match="on rank 1 since one of the steps 6 to 10; "):
        run_threads(3, rank)
