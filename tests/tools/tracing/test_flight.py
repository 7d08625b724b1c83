"""The operation at which the ranks of a run have parted, from their flight records."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pydtnn.comm.monitor.flight import write_flight
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.monitor.supervision import CurrentActivity
from pydtnn.comm.monitor.table import Watched
from pydtnn.tools.tracing.command import main
from pydtnn.tools.tracing.flight import describe_flights, find_parting, read_flights
from pydtnn.utils.observer import Kind
from tests.each import each
from tests.launch import run, why_not


class Ranks:
    """Ranks that make calls and are then recorded."""

    def __init__(self, folder: Path, size: int) -> None:
        memory = memoryview(bytearray(size * SLOT))
        self.slots = [Slot(memory, place) for place in range(size)]
        for rank, slot in enumerate(self.slots):
            slot.clear(rank, 5.0)
            slot.folder = str(folder / "flight")
        self.activities = [CurrentActivity(slot) for slot in self.slots]
        self.folder = folder

    def call(
        self,
        ranks: Sequence[int],
        name: str,
        *,
        nbytes: int = 0,
        bucket: int = -1,
        ends: bool = True,
        of: str = "all",
    ) -> None:
        """Make a call; one that does not `ends` is in progress."""
        for rank in ranks:
            activity = self.activities[rank]
            activity.group(of)
            activity.begin(Kind.CALL, name, nbytes=nbytes, bucket=bucket)
            if ends:
                activity.end()
            else:
                activity.call(name, of, 1, -1)

    def record(self, problems: dict[int, str] | None = None, lost: Sequence[int] = ()) -> None:
        rows = Watched(self.slots, "here").look(time.monotonic())
        for slot, row in zip(self.slots, rows, strict=True):
            row.problem = (problems or {}).get(row.rank, "")
            if row.rank not in lost:
                write_flight(slot, row, len(self.slots), "a test")


@pytest.fixture
def four(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path, 4)


def test_a_stopped_rank_is_named_with_the_call_that_it_has_not_made(four):
    for activity in four.activities:
        activity.begin(Kind.PHASE, "step")
    four.record()
    parting = find_parting(read_flights(four.folder))
    assert (parting.ranks, parting.text) == ((), "no rank waits for another")
    four.call(range(4), "allreduce", nbytes=8)
    four.activities[2].begin(Kind.FORWARD, "conv1")
    four.call((0, 1, 3), "allreduce", nbytes=64, ends=False)
    four.record({2: "stopped by a signal (SIGSTOP)"})
    parting = find_parting(read_flights(four.folder))
    assert parting.ranks == (2,)
    assert parting.operation == "allreduce (call 2 of group all, 64 B)"
    assert parting.text.startswith("rank 2: stopped by a signal (SIGSTOP), in forward of conv1")
    assert parting.text.endswith(
        "not made: allreduce (call 2 of group all, 64 B), which ranks 0-1, 3 have"
    )


def test_unequal_calls_are_named_before_all_else(four):
    four.call(range(4), "barrier")
    four.call((0, 1, 3), "gather_object", ends=False)
    four.call((2,), "barrier", ends=False)
    four.record()
    assert find_parting(read_flights(four.folder)).text == (
        "ranks 0-1, 3 have made gather_object (call 2 of group all), but rank 2 barrier (call 2 of "
        "group all)"
    )


def test_sums_of_other_lengths_are_unequal_and_other_parts_are_not(four):
    for rank in range(4):
        four.call((rank,), "allgather", nbytes=rank)
        four.call((rank,), "allreduce", nbytes=100 + (rank == 3))
    four.record()
    parting = find_parting(read_flights(four.folder))
    assert (parting.ranks, parting.operation) == ((3,), "allreduce (call 2 of group all, 100 B)")


def test_a_rank_that_waits_elsewhere_than_most_is_named(four):
    four.call(range(4), "iallreduce", of="all/0.0")
    four.call((0, 1, 2), "barrier", ends=False)
    four.call((3,), "iallreduce", of="all/0.0", ends=False)
    four.record()
    parting = find_parting(read_flights(four.folder))
    assert parting.ranks == (3,)
    assert parting.text.startswith("rank 3: waits in iallreduce of group all/0.0 ")
    assert parting.operation == "barrier (call 1 of group all)"


def test_the_partner_of_a_lost_message_is_named(four):
    four.activities[0].begin(Kind.WAIT, "irecv")
    four.activities[0].call("recv", "all", 0, 1)
    four.call((1, 2, 3), "iallreduce", ends=False)
    four.record()
    text = find_parting(read_flights(four.folder)).text
    assert text.startswith("rank 0: waits in irecv with rank 1")
    assert "; rank 1: waits in iallreduce" in text


def test_ranks_without_a_record_are_those_of_a_lost_host(four):
    four.call((0, 1), "barrier", ends=False)
    four.record(lost=(2, 3))
    parting = find_parting(read_flights(four.folder))
    assert parting.ranks == (2, 3)
    assert "ranks 2-3: no record, as their host was lost; others: waits in barrier" in parting.text


def test_the_report_has_a_table_and_the_last_activities_of_late_ranks(four, capsys):
    four.call(range(4), "allreduce", nbytes=8, bucket=0)
    four.activities[2].message(Kind.RECEIVED, "all", 1, 2, peer=3, tag=9, nbytes=5)
    four.call((0, 1, 3), "barrier", ends=False)
    four.record()
    lines = [*describe_flights(read_flights(four.folder), last=2)]
    assert lines[1] == "written: a test"
    assert [line.split()[0] for line in lines[2:5]] == ["rank", "0-1,", "2"]
    assert lines[5] == "last activities of rank 2:"
    assert lines[6].endswith("received all with rank 3, tag 9, 5 B: 0.000 ms")
    assert "call allreduce, call 1, bucket 0, 8 B: " in lines[7]
    assert main(["flight", str(four.folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == lines[0]


def test_what_is_no_flight_record_is_refused_in_one_sentence(four, capsys):
    assert main(["flight", str(four.folder)]) == 1
    four.record()
    folder = four.folder / "flight"
    for file in folder.iterdir():
        content = dict(np.load(file))
        about = json.loads(str(content["about"]))
        del about["flight"]
        np.savez(file, **(content | {"about": np.array(json.dumps(about))}))
    assert main(["flight", str(folder)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.startswith("pydtnn trace: ") for line in told] == [True, True]


HANGS = """
import os, signal, sys
import numpy as np
from pydtnn.callbacks import Callback
from pydtnn.comm import create_communicator
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.training.trainer import Trainer

comm = create_communicator()
comm.supervision.folder = "flight"
me = comm.rank == 2

class Hook(Callback):
    def on_step_end(self, trainer):
        if trainer.step == 7:
            comm.supervision.limit(2)  # no earlier: a rank may take longer to start
            if me and sys.argv[1] == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if not me and sys.argv[1] == "missing":
                comm.barrier()

rng = np.random.default_rng(0)
data = ArrayDataset(rng.standard_normal((400, 20)).astype("f4"), rng.integers(0, 4, 400), classes=4)
model = Model(Sequential(Linear(8), ReLU(), Linear(4)), (20,))
Trainer(model, "sgd", callbacks=[Hook()], progress="none", check_equal=0).fit(
    data, epochs=50, batch_size=10
)
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@each(
    ("cause", "words"),
    [
        ("stopped", "rank 2: stopped by a signal (SIGSTOP), in callback Hook"),
        ("missing", "not made: barrier (call 1 of group"),
    ],
)
def test_a_hang_leaves_a_record_that_names_rank_and_operation(cause, words, tmp_path, capsys):
    finished = run(4, ["-c", HANGS, cause], directory=tmp_path)
    assert finished.returncode == 75, finished
    assert main(["flight", str(tmp_path / "flight")]) == 0
    report = capsys.readouterr().out
    assert words in report.splitlines()[0], report
    assert "last activities of rank 2:" in report
