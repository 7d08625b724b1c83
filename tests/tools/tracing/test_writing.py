"""Traces of training runs, from the first step to the files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.tools.tracing import load_timeline, read_traces
from pydtnn.tools.tracing.recorder import Recorder
from pydtnn.tools.tracing.records import COSTS
from pydtnn.tools.tracing.writing import Trace
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import AgreedError, RankError
from pydtnn.utils.observer import Kind
from tests.each import each
from tests.small_training import Interrupt, Interrupted, small_fit, small_model

LAYERS = {"conv": {"type": "Conv2d", **dict.fromkeys(COSTS, 1)}}


def traced_fit(
    folder: Path,
    comm: Communicator,
    *callbacks: Callback,
    epochs: int = 1,
    steps: range | None = None,
) -> Trace:
    recorder = Recorder(steps)
    trainer = Trainer(
        small_model(),
        SGD(0.1, momentum=0.9),
        exchange=AllReduce(comm),
        callbacks=callbacks,
        observers=[recorder],
        progress=False,
    )
    with Trace(folder, recorder, trainer.comm, layers=LAYERS) as trace:
        small_fit(trainer, epochs)
    return trace


def early_messages(folder: Path) -> int:
    """Count the messages that arrive before they are sent, on the clock of rank 0."""
    messages = load_timeline(folder).messages
    assert len(messages)
    assert not len(messages.unmatched_sent)
    assert not len(messages.unmatched_received)
    return int((messages.received["stop"] < messages.sent["start"]).sum())


@each("ranks", [1, 3])
def test_the_files_contain_what_the_communicator_has_counted(ranks, tmp_path):
    traces = run_threads(ranks, lambda comm: traced_fit(tmp_path, comm))
    found = read_traces(tmp_path)
    assert len(found) == ranks
    assert {trace.records for trace in traces} == {sum(len(trace.records) for trace in found)}
    for rank, trace in enumerate(found):
        calls = trace.records[trace.records["kind"] == Kind.CALL]
        assert trace.about["sent"] == calls["nbytes"].sum()
        assert (trace.about["sent"] > 0) == (ranks > 1)
        assert (trace.about["rank"], trace.about["size"]) == (rank, ranks)
        assert trace.about["pid"] == os.getpid()
        assert trace.about["lanes"][:2] == ["main", "loader 0"]
        assert trace.about["layers"] == LAYERS
        assert trace.about["clock"]["error"] <= traces[0].error
    assert len(load_timeline(tmp_path).steps) == 4


def test_bytes_of_a_range_of_steps_are_those_of_its_calls(tmp_path):
    run_threads(2, lambda comm: traced_fit(tmp_path, comm, epochs=2, steps=range(2, 6)))
    for trace in read_traces(tmp_path):
        calls = trace.records[trace.records["kind"] == Kind.CALL]
        assert trace.about["sent"] == calls["nbytes"].sum() > 0
        assert {step for step in trace.records["step"].tolist() if step >= 0} == {0, 1, 2, 3}
        steps = trace.records[trace.records["name"] == trace.names.index("step")]
        assert len(steps) == 4


@pytest.mark.few(1)
@pytest.mark.mpi(2, 4)
def test_messages_of_processes_arrive_after_they_are_sent(comm, tmp_path):
    folder = comm.gather_object(tmp_path)[0]
    traced_fit(folder, create_allreduce("ring", comm), epochs=10)
    if comm.rank == 0:
        assert early_messages(folder) == 0
        for trace in read_traces(folder):
            calls = trace.records[trace.records["kind"] == Kind.CALL]
            assert trace.about["sent"] == calls["nbytes"].sum() > 0
    comm.barrier()


def test_an_interrupted_run_leaves_its_trace(tmp_path):
    def rank(comm: Communicator) -> None:
        with pytest.raises(Interrupted):
            traced_fit(tmp_path, comm, Interrupt(3))

    run_threads(2, rank)
    assert len(load_timeline(tmp_path).steps) == 3


def test_an_error_of_one_rank_leaves_the_traces_of_those_that_are_there(tmp_path):
    class Failing(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.comm.rank == 1 and trainer.step == 2:
                raise RuntimeError("no more")

    with pytest.raises(RankError, match="no more"):
        run_threads(2, lambda comm: traced_fit(tmp_path, comm, Failing()))
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0000.npz", "rank-0001.npz"}
    names = read_traces(tmp_path)[1].names
    assert {"callback Failing", "update"} <= set(names)


def test_a_folder_with_a_trace_or_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "rank-0000.npz").touch()

    def rank(comm: Communicator) -> None:
        with pytest.raises(AgreedError, match="expected a folder without a trace, got"):
            traced_fit(tmp_path, comm)
        with pytest.raises(AgreedError, match="^trace: cannot write "):
            traced_fit(tmp_path / "rank-0000.npz" / "inside", comm)

    run_threads(2, rank)
    assert not (tmp_path / "rank-0000.npz").stat().st_size


def test_a_trace_that_cannot_be_written_is_an_error_of_all_ranks(tmp_path, monkeypatch):
    def full(folder: Path, records: np.ndarray, names: Any, about: Any) -> None:
        if about["rank"] == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("pydtnn.tools.tracing.writing.write_trace", full)

    def rank(comm: Communicator) -> None:
        with pytest.raises(AgreedError, match="^rank 1: trace: cannot write .*: no space"):
            traced_fit(tmp_path, comm)

    run_threads(2, rank)
