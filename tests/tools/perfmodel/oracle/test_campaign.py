"""Campaigns: the time and the cost of many epochs, with failures."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.oracle import Oracle
from pydtnn.tools.perfmodel.oracle.ask import main
from pydtnn.tools.perfmodel.oracle.campaign import Terms, plan_campaign
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload
from pydtnn.utils.failures import optimal_interval
from tests.each import each

WORK = Workload("resnet8", (16, 16, 3), batch=64, samples=64_000)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    platform = Platform.load("cpu-1gbit")
    return Oracle(Projector(WORK, platform, AnalyticCosts(platform)))


def test_a_campaign_is_the_sum_of_its_parts(oracle):
    entry = oracle.entry(replace(WORK, axes={"data": 4}))
    assert entry.projection is not None
    plain = plan_campaign(entry, oracle.projector, Terms(10, watts=300, price=2))
    assert plain.seconds == pytest.approx(10 * entry.projection.epoch)
    assert (plain.hosts, plain.failures) == (4, 0)
    assert plain.energy == pytest.approx(4 * 300 * plain.seconds)
    assert plain.cost == pytest.approx(2 * 4 * plain.seconds / 3600)
    # all ranks together read from a file system, beside the step
    read = plan_campaign(entry, oracle.projector, Terms(1, sample_bytes=1e5, read=1e7))
    assert read.seconds - read.parts["checkpoints"] == pytest.approx(WORK.samples * 1e5 / 1e7)
    fast = plan_campaign(entry, oracle.projector, Terms(1, sample_bytes=1e5, read=1e12))
    assert fast.seconds == pytest.approx(plain.seconds / 10)


def test_failures_cost_what_daly_says(oracle):
    entry = oracle.entry(replace(WORK, axes={"data": 4}))
    one = entry.projection
    assert one is not None
    found = plan_campaign(entry, oracle.projector, Terms(100, mtbf=400.0, restart=5.0))
    mtbf, useful = 100.0, 100 * WORK.steps * one.seconds
    step = optimal_interval(one.checkpoint, mtbf)
    whole = mtbf * exp(5 / mtbf) * (exp((step + one.checkpoint) / mtbf) - 1) * useful / step
    assert found.seconds == pytest.approx(whole)
    assert found.failures == pytest.approx(whole / mtbf)
    assert found.parts["failures"] > 0
    platform = one.platform
    slow = replace(platform, storage=replace(platform.storage, write=None))
    none = replace(entry, projection=replace(one, platform=slow))
    with pytest.raises(ValueError, match=r"storage\.write"):
        plan_campaign(none, oracle.projector.on(slow), Terms(1, mtbf=400.0))


def test_a_run_that_continues_loses_the_hosts_that_fail(oracle):
    entry = oracle.entry(replace(WORK, axes={"data": 4}))
    one, fewer = entry.projection, oracle.entry(replace(WORK, axes={"data": 3})).projection
    assert one is not None
    assert fewer is not None
    plain = plan_campaign(entry, oracle.projector, Terms(1)).seconds
    found = plan_campaign(entry, oracle.projector, Terms(1, mtbf=1e7, restart=5.0, survive=True))
    assert found.failures == pytest.approx(4 * plain / 1e7, rel=0.01)
    assert found.parts["failures"] == pytest.approx(found.failures * (5 + one.seconds / 2))
    # hosts fail at any time: for half of the run, of those that fail, there is one host fewer
    slower = found.failures / 2 * plain * (1 - one.seconds / fewer.seconds)
    assert found.parts["fewer hosts"] == pytest.approx(slower, rel=0.05)
    assert found.host_hours == pytest.approx(found.failures * 1e7 / 3600)
    assert found.host_hours < 4 * found.seconds / 3600


def test_snapshots_of_state_that_not_all_ranks_have_take_time(oracle):
    terms = Terms(1, mtbf=1e7, restart=5.0, survive=True)
    alike, parts = (
        plan_campaign(oracle.entry(replace(WORK, axes=axes)), oracle.projector, terms)
        for axes in ({"data": 4}, {"data": 2, "filter": 2})
    )
    assert "snapshots" not in alike.parts
    state = oracle.projector.project(replace(WORK, axes={"data": 2, "filter": 2})).state
    copy = 2 * state / oracle.projector.platform.messages.between.bandwidth
    useful = parts.seconds - parts.parts["failures"] - parts.parts["fewer hosts"]
    interval = (useful - parts.parts["snapshots"]) * copy / parts.parts["snapshots"]
    assert interval == pytest.approx(optimal_interval(copy, 1e7 / 4))
    assert parts.parts["failures"] == pytest.approx(parts.failures * (5 + interval / 2))


QUICK = [
    *("--model", "resnet8", "--shape", "16,16,3", "--classes", "10", "--platform", "cpu-1gbit"),
    *("--ranks", "1-4", "--global-batch-size", "64", "--strategies", "data", "--samples", "64000"),
]


def test_the_command_answers_and_explains(capsys):
    asked = ["--epochs", "90", "--explain"]
    costs = ["--watts", "300", "--price", "2", "--mtbf", "365 d", "--read", "1 GB/s"]
    costs += ["--survive", "1 s"]
    assert main([*QUICK, *asked, *costs]) == 0
    out = capsys.readouterr().out
    for words in (
        "computed from: peaks of computation", "fewer than two of 1 hosts",
        "90 epochs x 64,000 / 64 samples = 90,000", "time between failures: 3.154e+07 s of a host",
    ):  # fmt: skip
        assert words in out


@each(
    ("arguments", "words"),
    [
        ([], "--epochs"),
        (["--step", "5 ms"], "expected --epochs, got --step, which has been removed"),
        (["--epochs", "1", "--mtbf", "5"], "--mtbf: expected a number with a unit"),
        (["--epochs", "1", "--watts", "-1"], "--watts: expected at least 0"),
        (["--epochs", "1", "--survive", "1 s"], "--survive: expected --mtbf"),
        (["--epochs", "1", "--ranks", "128"], "128 ranks"),
    ],
)
def test_bad_questions_are_one_sentence(capsys, arguments, words):
    assert main([*QUICK, *arguments]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
