"""What trainers report to observers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pydtnn import Model, Trainer
from pydtnn.callbacks import Checkpointer
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import AllReduce, create_scheme
from pydtnn.utils.observer import Kind, Observer
from tests.each import each
from tests.parallel.schemes.course import OF_ANY_RULE
from tests.small_mesh import SHAPE, mesh_fit, small_net
from tests.small_training import Interrupt, Interrupted, small_data, small_fit, small_model


class Log(Observer):
    """Keeps what it is told, with the path of each activity."""

    def __init__(self) -> None:
        self.open: list[tuple[Kind, str]] = []
        self.paths: list[tuple[tuple[Kind, str], ...]] = []
        self.buckets: list[tuple[str, int]] = []
        self.bytes = 0
        self.steps: list[tuple[int, int]] = []
        self.messages: list[tuple[Kind, str, int, int, int]] = []
        self.lanes: dict[str, Log] = {}

    def lane(self, name: str) -> Observer:
        return self.lanes.setdefault(name, Log())

    def step(self, epoch: int, step: int) -> None:
        self.steps.append((epoch, step))

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self.open.append((kind, name))
        self.paths.append(tuple(self.open))
        self.buckets.append((name, bucket))
        assert nbytes == 0 or kind is Kind.CALL
        self.bytes += nbytes

    def end(self) -> None:
        self.open.pop()

    def message(
        self, kind: Kind, name: str, start: int, stop: int, *, peer: int, tag: int, nbytes: int
    ) -> None:
        assert start <= stop
        self.messages.append((kind, name, peer, tag, nbytes))

    def phases(self) -> Counter[str]:
        """Count the phases by name."""
        return Counter(name for *_, (kind, name) in self.paths if kind is Kind.PHASE)


def observed_trainer(comm: Communicator, *observers: Observer, **options: Any) -> Trainer:
    options = {"exchange": AllReduce(comm), "progress": False} | options
    return Trainer(small_model(), SGD(0.1, momentum=0.9), observers=observers, **options)


def matched(logs: list[Log]) -> int:
    """Assert that each message of a rank is one of its peer, in order, and return their number."""
    sent, received = (
        [
            (*((rank, peer) if kind is Kind.SENT else (peer, rank)), name, tag, nbytes)
            for rank, log in enumerate(logs)
            for what, name, peer, tag, nbytes in log.messages
            if what is kind
        ]
        for kind in (Kind.SENT, Kind.RECEIVED)
    )
    assert Counter(sent) == Counter(received)
    return len(sent)


def test_a_run_is_phases_of_steps_layers_and_batches(tmp_path):
    log = Log()
    trainer = observed_trainer(Serial(), log, callbacks=[Checkpointer(tmp_path)])
    small_fit(trainer)
    assert not log.open
    phases = log.phases()
    assert phases["start"] == 1
    assert phases["epoch"] == phases["evaluation"] == phases["checkpoint"] == 2
    assert phases["data"] == phases["step"] == phases["backward"] == 8
    assert phases["forward"] == 2 * 8  # preparation, and the layers
    assert log.steps == [(epoch, step) for epoch in range(2) for step in range(4)]
    layers = [node.name for node in trainer.model.graph.nodes[1:]]

    def within(name: str) -> list[tuple[Kind, str]]:
        above = ((Kind.PHASE, "epoch"), (Kind.PHASE, "step"), (Kind.PHASE, name))
        return [path[3] for path in log.paths if path[:3] == above and len(path) == 4]

    forward = within("forward")
    backward = [activity for activity in within("backward") if activity[0] is Kind.BACKWARD]
    assert forward == [(Kind.FORWARD, name) for name in layers] * 8
    assert backward == [(Kind.BACKWARD, name) for name in reversed(layers)] * 8
    loads = {name: len(lane.paths) for name, lane in log.lanes.items()}
    assert loads == {"loader 0": 8, "evaluation loader 0": 4}
    assert {path for lane in log.lanes.values() for path in lane.paths} == {((Kind.LOAD, "batch"),)}


def test_without_threads_batches_are_loaded_in_the_phase_data():
    log = Log()
    train, _ = small_data()
    observed_trainer(Serial(), log).fit(train, global_batch_size=8, loader_threads=0)
    loads = [path for path in log.paths if path[-1] == (Kind.LOAD, "batch")]
    assert len(loads) == 4
    assert {path[-2] for path in loads} == {(Kind.PHASE, "data")}
    assert not log.lanes


@pytest.mark.few(4)
@pytest.mark.parametrize("scheme", OF_ANY_RULE)
def test_bytes_of_calls_are_those_that_the_communicator_counts(scheme):
    def rank(comm: Communicator) -> Log:
        log = Log()
        trainer = observed_trainer(comm, log, exchange=create_scheme(scheme, comm))
        small_fit(trainer)
        assert log.bytes == trainer.comm.traffic.bytes > 0
        assert not log.open
        return log

    logs = run_threads(4, rank, hosts="aabb")
    matched(logs)
    for log in logs:
        updated = {bucket for name, bucket in log.buckets if name == "update"}
        assert updated >= {0}
        communication = [path for path in log.paths if path[-1][0] in (Kind.CALL, Kind.WAIT)]
        within = {path[2][1] for path in communication if len(path) > 3 and path[1][1] == "step"}
        assert within <= {"forward", "loss", "backward", "exchange"}


@each(("algorithm", "peers"), [("ring", {1, 3}), ("recursive_doubling", {1, 2})])
def test_the_rounds_of_schedules_are_messages(algorithm, peers):
    """Between ranks by the numbers that they have in the group that trains."""

    def rank(comm: Communicator) -> Log:
        log = Log()
        with comm.split(comm.rank // 4) as group:
            small_fit(observed_trainer(create_allreduce(algorithm, group), log), epochs=1)
        return log

    logs = run_threads(5, rank)
    assert matched(logs[:4]) > 4 * 4
    assert {peer for _, _, peer, _, _ in logs[0].messages} == peers


def test_a_recomputed_pass_has_a_name_of_its_own():
    log = Log()
    model = Model(small_net(True), SHAPE, backend="numpy", recompute=2)
    trainer = Trainer(model, "sgd", progress=False, observers=[log])
    mesh_fit(trainer)
    again = [path for path in log.paths if path[-1][1].endswith(" (recomputed)")]
    assert again
    assert {path[-2] for path in again} == {(Kind.PHASE, "backward")}
    assert {path[-1][0] for path in again} == {Kind.FORWARD}


def test_layers_of_several_shards_are_properly_nested():
    """Shards take turns at batch norms, which add up their sums."""
    log = Log()
    trainer = observed_trainer(Serial(), log, accumulation=2, sync_batch_norm=True)
    small_fit(trainer, epochs=1)
    assert not log.open
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    assert all(sum(kind in kinds for kind, _ in path) <= 1 for path in log.paths)
    norms = [path for path in log.paths if path[-1] == (Kind.FORWARD, "batchnorm1")]
    assert len(norms) > 2 * 4  # before and after the sum


def test_a_failure_ends_all_activities_and_the_observation():
    """Of all observers of a trainer, which are told the same."""
    log, second = Log(), Log()
    trainer = observed_trainer(Serial(), log, second, callbacks=[Interrupt(2)])
    with pytest.raises(Interrupted):
        small_fit(trainer)
    assert not log.open
    assert len(log.steps) == 2
    told = len(log.paths)
    small_fit(Trainer(trainer.model, SGD(0.1), exchange=trainer.exchange, progress=False))
    assert len(log.paths) == told
    assert second.paths == log.paths


def test_an_observer_of_another_class_is_refused():
    with pytest.raises(TypeError, match="expected objects of a subclass of Observer, got 'trace'"):
        Trainer(small_model(), SGD(0.1), observers=["trace"], progress=False)  # type: ignore[list-item]
