from benchmarks.regret import Case, Outcome, table
from pydtnn.training.workload import Workload
from tests.benchmarks.test_benchmarks import lines

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


def test_one_rank_is_predicted_and_measured():
    options = ["--model", "mlp", "--input", "12x12x1", "--batch", "8", "--turns", "1"]
    *_, row, chosen, last = lines("regret", *options, "--steps", "2")
    assert row.split()[0] == "serial"
    assert chosen == "chosen: serial; fastest: serial"
    assert last == "regret 0.0%"
