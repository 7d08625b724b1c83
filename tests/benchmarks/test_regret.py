import math
import sys
from argparse import Namespace

from benchmarks import regret
from benchmarks.regret import Case, Outcome, table
from pydtnn.comm import create_communicator
from pydtnn.training.workload import Workload

WORK = Workload("mlp", (12, 12, 1))


def test_the_regret_is_that_of_the_strategy_predicted_to_be_the_fastest():
    outcomes = [
        Outcome(Case("data 2", WORK, 0.010), 0.012),
        Outcome(Case("filter 2", WORK, 0.011), 0.0100),
        Outcome(Case("spatial 2", WORK, 0.020), 0.030),
    ]
    *rows, chosen, last = table(outcomes)
    assert [row.split()[-1] for row in rows[1:]] == ["83%", "90%", "67%"]
    assert chosen == "chosen: data 2; fastest: filter 2"
    assert last == "regret 20.0%, tau 0.33"


def test_steps_that_differ_too_much_are_not_compared():
    case, steps = Case("data 2", WORK, 0.010), [0.01, 0.012, 0.02, 0.03, 0.04]
    assert regret.outcome(case, steps[:3]) == Outcome(case, 0.012)
    found = regret.outcome(case, steps)
    assert found.case.reason.startswith("not compared: the machine is busy: half of the steps")
    assert table([found])[-1].startswith("no strategy is compared")


def test_a_strategy_that_is_not_predicted_on_a_busy_machine_is_left_out(monkeypatch):
    def busy(*arguments: object) -> None:
        raise ValueError("the machine is busy")

    monkeypatch.setattr(regret, "predict_job", busy)
    options = {"model": "mlp", "shape": "12x12x1", "classes": 10, "batch": 8}
    args = Namespace(**options, platform=None, formulas=False, most=9)
    (case,) = regret.find_cases(create_communicator(), args)
    assert case.reason == "not predicted: the machine is busy"
    assert table([Outcome(case, 0.03)])[1:] == [
        "serial             -           30  not predicted: the machine is busy",
        "no strategy is compared: repeat this when the machine is idle",
    ]
    known = [Outcome(Case("data 2", WORK, 0.01), 0.02), Outcome(case, 0.001)]
    assert table(known)[-2:] == ["chosen: data 2; fastest: data 2", "regret 0.0%"]


def test_one_rank_is_predicted_and_measured(monkeypatch, capsys):
    monkeypatch.setattr(regret, "MAX_SPREAD", math.inf)  # other tests keep the machine busy
    options = ["--model", "mlp", "--input", "12x12x1", "--batch", "8", "--turns", "1"]
    options += ["--steps", "2", "--platform", "cpu-1gbit"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.regret", *options])
    regret.main()
    *_, row, chosen, last = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "serial"
    assert chosen == "chosen: serial; fastest: serial"
    assert last == "regret 0.0%"
