"""Tables of predicted beside measured times."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy.cases import PLANS, ranks_of, workload_of
from benchmarks.oracle import Row, kendall, regret, summary
from tests.each import each

ROOT = Path(__file__).resolve().parents[2]


def row(plan: str, measured: float, predicted: float, layout: str = "1gbit 2x2") -> Row:
    return Row(layout, "resnet20", plan, 64, measured, predicted, 100.0, 97.0)


ROWS = [row("data-4", 0.1, 0.09), row("sharded-4", 0.2, 0.21), row("top_k-4", 0.12, 0.08)]


@each(("ys", "tau"), [([1, 2, 3], 1.0), ([3, 2, 1], -1.0), ([2, 1, 3], 1 / 3)])
def test_kendalls_tau_compares_the_order_of_pairs(ys, tau):
    assert kendall([10, 20, 30], ys) == pytest.approx(tau)


def test_the_summary_has_mean_and_worst_and_the_order_on_each_cluster():
    assert regret(ROWS[:2]) == 0.0
    lines = list(summary(ROWS))
    assert lines[0] == "accuracy of times: mean 83.9%, worst 66.7%"
    assert lines[1] == ("memory: 3 of 3 within 5 % or 3 MiB, worst error -3.0% (resnet20, data-4)")
    assert " ".join(lines[2].split()) == "1gbit 2x2 resnet20 64 tau 0.33, regret 20.0%"


@each("plan", PLANS)
def test_every_plan_is_a_workload_of_its_number_of_ranks(plan):
    assert workload_of(f"resnet20/{plan}/64").ranks == ranks_of(plan)


@each("case", ["resnet20", "vgg99/one/8"])
def test_a_case_that_does_not_exist_is_an_error(case):
    with pytest.raises(ValueError, match="oracle: expected NETWORK/PLAN/BATCH with one of"):
        workload_of(case)


def test_a_case_is_predicted_and_measured():
    command = [sys.executable, "-m", "benchmarks.oracle", "--quick", "--networks", "cnn"]
    done = subprocess.run(
        [*command, "--plans", "one", "--batches", "8"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +cnn +one +8 +[\d.]+ +[\d.]+ +-?[\d.]+%", done.stdout, re.M)
    assert "accuracy of times: mean" in done.stdout
