"""Ranks with few samples or none in a step compute what one rank computes, under every schedule."""

from __future__ import annotations

import pytest

from pydtnn.comm import Serial, run_threads
from pydtnn.model.pipeline import PIPELINE_SCHEDULES
from pydtnn.utils.errors import RankError
from tests import launch
from tests.fuzz.uneven import IMAGES, Uneven, assert_equal, is_refused

LAUNCHED = 8
"""Cases of one MPI world."""


def assert_as_serially(uneven: Uneven) -> None:
    """Train on ranks that are threads; they end with an error if all of them wait."""
    try:
        found = run_threads(uneven.ranks, uneven.train)
    except (RankError, ValueError) as error:
        if not is_refused(error):
            raise
        return
    expected = uneven.train(Serial(), serial=True)
    for own in found:
        assert_equal(own, expected, repr(uneven))
        for name in (name for name in own if name.startswith("state")):
            assert own[name].tobytes() == found[0][name].tobytes(), f"{name} of {uneven}"


@pytest.mark.fuzz("distributed")
def test_steps_with_few_samples_compute_what_one_rank_computes(cases):
    for case in cases:
        case.compare(assert_as_serially, Uneven(int(case.rng.integers(1 << 31))))


@pytest.mark.fuzz("distributed")
@pytest.mark.skipif(bool(launch.why_not()), reason=launch.why_not())
def test_steps_with_few_samples_compute_over_mpi_what_one_rank_computes(cases):
    for case in cases:
        seeds = map(str, case.rng.integers(1 << 31, size=LAUNCHED).tolist())
        finished = launch.run(4, ["-m", "tests.fuzz.uneven", *seeds], timeout=300)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        case.comparisons += LAUNCHED


@pytest.mark.parametrize("axes", [{"data": 2, "pipeline": 2}, {"data": 3, "pipeline": 2}], ids=str)
@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_schedule_takes_every_number_of_samples(schedule, axes, request):
    own = {"kind": "dense", "axes": axes, "schedule": schedule, "parts": 2}
    most = 2 * 2 * axes["data"]  # two micro-batches for each rank's two
    every = request.config.getoption("matrix")
    for last in range(1, most + 1) if every else (1, axes["data"] + 1):
        assert_as_serially(Uneven(last, last=last, **own))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("gpt", {"data": 2, "context": 2}),
        ("vit", {"data": 2, "context": 3}),  # more ranks than heads: a ring
        ("llama", {"shard": 2, "context": 3}),
        ("gpt", {"data": 2, "filter": 3}),
        ("llama", {"data": 2, "tensor": 3}),
        ("moe", {"expert": 2, "context": 2}),
        ("moe", {"data": 2, "expert": 2}),
        ("moe", {"data": 2, "pipeline": 2}),
        *(("conv", {"data": 2, axis: 2}) for axis in IMAGES),
    ],
    ids=str,
)
def test_a_rank_without_samples_takes_part_along_every_axis(kind, axes):
    assert_as_serially(Uneven(1, kind=kind, axes=axes, parts=1, last=1))
