"""Runs of ranks that are threads, some of which fail: the others continue, to the same end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn import Model, Trainer
from pydtnn.callbacks import Callback
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run import run
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.schedules.rule import by_rule
from pydtnn.comm.thread import Killed, ThreadCommunicator
from pydtnn.layers import Linear, Sequential
from pydtnn.parallel.schemes import AllReduce, ShardedOptimizer
from pydtnn.saving.weights import decode
from pydtnn.tools.survival.recovery import RecoveryState, capture
from pydtnn.tools.tracing import build_timeline, read_traces
from pydtnn.tools.tracing.summary import summarize
from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.utils.errors import AgreedError, RankFailure, TooFewRanksError
from pydtnn.utils.interval import parse_interval
from tests.each import each
from tests.small_training import small_fit, small_trainer

OPTIONS: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": [16, 16]},
    "dataset_options": {"samples": 64, "test_samples": 16, "shape": [8, 8, 1], "classes": 4},
    "global_batch_size": 16,
    "epochs": 2,
    "threads": 1,
    "quiet": True,
    "tuning": "fixed",
    "survive": True,
    "straggler_factor": 0.0,
}

Failures = dict[int, int]
"""Ranks by their first number, and the call of a communicator in which each fails."""


def train(folder: Path, ranks: int = 3, **options: Any) -> bytes:
    """Train in a folder; return the bytes of the weights."""
    save = folder / "end.safetensors"
    config = TrainConfig(**OPTIONS | options, output_dir=str(folder / "run"), save=str(save))
    run_threads(ranks, lambda comm: run(config, comm))
    return save.read_bytes()


def about(folder: Path) -> Any:
    return json.loads((folder / "run" / "run.json").read_text())


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[Failures], None]:
    """A function that sets who fails when, from now on."""
    chosen: Failures = {}
    counts: dict[int, Iterator[int]] = {}

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(comm: Any, *args: Any) -> Any:
            rank = comm.members[comm.rank]
            if next(counts.setdefault(rank, itertools.count())) == chosen.get(rank):
                raise Killed
            return original(comm, *args)

        return call

    for name in ("_join", "_isend"):
        monkeypatch.setattr(ThreadCommunicator, name, counted(getattr(ThreadCommunicator, name)))

    def choose(failures: Failures) -> None:
        chosen.clear()
        counts.clear()
        chosen.update(failures)

    return choose


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "all_failures",
    [
        [{0: 4}, {0: 34}, {0: 53}, {0: 122}],  # before training ... at its end
        [{2: 33}, {2: 41}, {2: 60}, {2: 107}],
        [{0: 60, 1: 60}, {0: 60, 1: 75}],  # together, and while the others recover
    ],
)
def test_exact_training_ends_with_the_bytes_of_an_undisturbed_run(tmp_path, kill, all_failures):
    options = {"exact": True, "checkpoint_every": "3 steps", "ema": 0.9, "plateau": 1}
    kill({})
    expected = train(tmp_path / "undisturbed", **options)
    for number, failures in enumerate(all_failures):
        kill(failures)
        assert train(tmp_path / str(number), **options) == expected, failures


def test_the_global_batch_is_that_of_all_ranks_with_which_the_run_began(tmp_path, kill):
    """Also if a rank fails before the first attempt has counted its samples."""
    for number, failures in enumerate(({0: 1}, {1: 40})):
        kill(failures)
        train(tmp_path / str(number), batch_size=6, global_batch_size=None, accumulation=2)
        content = about(tmp_path / str(number))
        assert content["global_batch_size"] == 18
        [failure] = content["failures"]
        assert (failure["ranks"], failure["remaining"]) == ([*failures], 2)
        assert failure["lost_steps"] == 0
        assert all(failure[name] >= 0 for name in ("agreement", "rebuilding", "next_step"))


@pytest.mark.parametrize("call", [pytest.param(350, marks=pytest.mark.long), 900])
def test_the_trace_has_the_failure_and_the_records_of_the_ranks_that_remain(tmp_path, kill, call):
    """In a step, and at the end, when other ranks have written their files."""
    kill({0: call})
    train(tmp_path, trace=str(tmp_path / "trace"), parallel="pipeline=3", buddy_interval="2 steps")
    [failure] = about(tmp_path)["failures"]
    assert failure["ranks"] == [0]
    traces = read_traces(tmp_path / "trace")
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        [text] = trace.about["failures"]
        assert text.startswith("rank 0 has failed: 2 ranks continue after step ")
        assert {*trace.records["peer"]} == {-1, 1 - trace.rank}
        [recovery] = trace.records[trace.records["name"] == trace.names.index("recovery")]
        assert (recovery["depth"], recovery["step"]) == (0, -1)
        steps = trace.records[trace.records["name"] == trace.names.index("step")]
        everything = {(epoch, step) for epoch in range(2) for step in range(4)}
        assert {(one["epoch"], one["step"]) for one in steps} == everything
    assert any(line.startswith("rank 0 has failed") for line in summarize(build_timeline(traces)))


def test_with_too_few_ranks_a_checkpoint_is_saved(tmp_path, kill):
    kill({1: 50})
    with pytest.raises(TooFewRanksError, match=r"^2 of 3 ranks remain, fewer than"):
        train(tmp_path, min_ranks=3)
    assert TooFewRanksError.status == 75
    assert find_checkpoints(tmp_path / "run")
    kill({1: 50})
    with pytest.raises(RankFailure, match="a rank has failed; start with --survive"):
        train(tmp_path / "without", survive=False)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "sharded", "exact": True},
        {"scheme": "sharded_parameters"},
        {"compress": "top_k"},
        {"parallel": "data=1,filter=3"},
        {"parallel": "pipeline=3", "exact": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_runs_whose_ranks_have_parts_of_the_state_return_to_a_snapshot(tmp_path, kill, options):
    kill({})
    expected = train(tmp_path / "undisturbed", buddy_interval="3 steps", **options)
    for victim, call in ((0, 60), (2, 50)):
        kill({victim: call})
        weights = train(tmp_path / str(victim), buddy_interval="3 steps", **options)
        [failure] = about(tmp_path / str(victim))["failures"]
        assert (failure["ranks"], failure["remaining"]) == ([victim], 2)
        assert 0 <= failure["lost_steps"] <= 3
        if "exact" in options:
            assert weights == expected
        assert all(np.isfinite(array).all() for array in decode(weights).values())


RECYCLED: dict[str, Any] = {
    "survive_stages": "recycle",
    "model_options": {"hidden": [16, 16, 16]},
    "dtype": "float64",
    "global_batch_size": 24,
    "buddy_interval": "3 steps",
}

LOST: list[tuple[tuple[int, int], list[Failures], list[str | None]]] = [
    ((2, 2), [{3: 60}], ["recycle:2x2-3"]),
    ((2, 2), [{0: n} for n in (5, 45, 98, 130, 160, 203)], ["recycle:2x2-0"] * 6),
    ((2, 2), [{0: 60, 3: 75}, {1: 60, 3: 90}], ["recycle:2x2-0-3", "1f1b"]),  # 1, 3: of one stage
    (
        (3, 2),
        [{4: 31}, {1: 80}, {1: 60, 2: 110}],
        ["recycle:3x2-4", "recycle:3x2-1", "recycle:3x2-1-2"],
    ),
    (
        (2, 4),
        [{5: 70}, {2: 150}, {7: 33, 0: 90}],
        ["recycle:2x4-5", "recycle:2x4-2", "recycle:2x4-0-7"],
    ),
]
"""Pipelines and stages, who fails when, and the schedule with which the run ends."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("grid", "all_failures", "schedules"), LOST)
def test_peers_compute_the_micro_batches_of_a_lost_stage(
    tmp_path, kill, grid, all_failures, schedules
):
    """The parameters are those of a run without failures: the same micro-batches are computed."""
    options = {**RECYCLED, "parallel": "data={},pipeline={}".format(*grid), "micro_batches": 4}
    ranks = grid[0] * grid[1]
    kill({})
    expected = decode(train(tmp_path / "undisturbed", ranks, **options))
    for number, (failures, schedule) in enumerate(zip(all_failures, schedules, strict=True)):
        kill(failures)
        found = decode(train(tmp_path / str(number), ranks, **options))
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-14)
        content = about(tmp_path / str(number))
        if schedule != "1f1b":  # peers have the state, and snapshots are not needed
            assert all(one["lost_steps"] <= 1 for one in content["failures"])
        assert sorted(r for one in content["failures"] for r in one["ranks"]) == sorted(failures)
        assert content["configuration"]["pipeline_schedule"] == schedule


@each(
    ("options", "message"),
    [
        (
            {"parallel": "data=3"},
            "requires at least 2 ranks along data and pipeline, no other axis",
        ),
        (
            {"parallel": "data=2,pipeline=2", "pipeline_schedule": "zb_v"},
            "one stage per rank, such",
        ),
        (
            {"parallel": "data=2,pipeline=2", "scheme": "local_sgd"},
            "are neither exact nor compressed",
        ),
    ],
)
def test_ranks_without_peers_are_refused(tmp_path, options, message):
    with pytest.raises(AgreedError, match=f"train: --survive.*{message}"):
        train(tmp_path, 3 if options["parallel"] == "data=3" else 4, **RECYCLED, **options)


class Remembers(Callback):
    """Notes after each step of which steps there are snapshots."""

    def __init__(self) -> None:
        self.memory, self.taken = RecoveryState(parse_interval("test", "3 steps"), 3600.0), []

    def on_fit_ready(self, trainer: Any, epochs: int, steps: int) -> None:
        self.memory.begin(trainer)

    def on_step_end(self, trainer: Any) -> None:
        self.memory.after_step(trainer)
        self.taken.append([one.iterations for one in self.memory.snapshots])


@pytest.mark.threads(2)
def test_a_snapshot_is_taken_at_the_interval(comm):
    remembers = Remembers()
    small_fit(small_trainer(None, remembers, exchange=ShardedOptimizer(comm)))
    assert remembers.taken == [[0], [0], [0, 3], [0, 3], [0, 3], [3, 6], [3, 6], [3, 6]]


def test_residuals_of_networks_that_are_cut_are_refused(tmp_path):
    with pytest.raises(AgreedError, match="train: --survive: residuals of compression are not"):
        train(tmp_path, compress="top_k", parallel="data=1,filter=3")


def test_the_state_is_captured_while_messages_to_a_failed_rank_are_pending():
    def work(comm: Communicator) -> bool:
        model = Model(Sequential(Linear(2)), (3,), seed=0)
        trainer = Trainer(model, "sgd", exchange=AllReduce(comm), progress=False)
        trainer.exchange.start(model.buckets)
        if comm.rank == 1:
            raise Killed
        trainer.exchange.bucket_ready(model.buckets[0])
        with pytest.raises(RankFailure):
            comm.barrier()
        return "model" in capture(trainer).states

    assert run_threads(2, work) == [True, None]


def test_the_remaining_ranks_of_several_hosts_keep_their_order():
    """Their sums go through a communicator that chooses the algorithm."""

    def work(comm: Communicator) -> tuple[int, int, tuple[int, ...]]:
        ruled = by_rule(comm)
        try:
            if comm.rank == 1:
                raise Killed
            ruled.barrier()
        except RankFailure:
            assert not ruled.why_not_survived()
            assert ruled.lost_ranks()
            comm = comm.shrink()
        total = np.array([1.0])
        comm.allreduce(total)
        return comm.rank, int(total[0]), tuple(comm.members)

    remaining = (0, 2, 3)
    found = run_threads(4, work, hosts=[0, 0, 1, 1])
    assert found == [(0, 3, remaining), None, (1, 3, remaining), (2, 3, remaining)]
