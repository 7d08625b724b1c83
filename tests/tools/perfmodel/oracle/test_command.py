import csv

import pytest

from pydtnn.tools.perfmodel.oracle.command import main
from tests.each import each

NET = ["--model", "resnet20", "--input", "16x16x3", "--classes", "10", "--platform", "cpu-10gbit"]
QUICK = [*NET, "--global-batch", "64", "--no-recompute", "--no-sharded"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*QUICK, *arguments]) == 0
    return capsys.readouterr().out


def test_the_best_strategy_of_each_number_of_ranks_is_listed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    file = tmp_path / "all.csv"
    out = run(capsys, "--ranks=1-4", "--strategies=data,filter", f"--csv={file}")
    assert "global batch 64" in out
    assert "fastest: " in out
    assert "head.fc has 10 features" in out
    assert max(map(len, out.splitlines()[1:5])) <= 90
    rows = [*csv.DictReader(file.read_text().splitlines())]
    assert {row["ranks"] for row in rows} == {"1", "2", "4"}
    assert {"data 4", "filter 2"} <= {row["strategy"] for row in rows}


def test_hosts_that_the_platform_does_not_have_are_noted_or_refused(capsys, tmp_path):
    note = "note: cpu-10gbit has 32 hosts, 64 ranks need 64: further ones"
    assert note in run(capsys, "--ranks", "64", "--strategies", "data")
    assert note in run(capsys, "--ranks", "2", "--explain", "data=64")
    assert "note: " not in run(capsys, "--ranks", "32", "--strategies", "data")
    path = tmp_path / "tree.yaml"
    path.write_text("base: cpu-10gbit\nname: tree\ntopology: {fat_tree: {down: [32]}}\n")
    arguments = [*QUICK, "--ranks", "64"]
    arguments[arguments.index("cpu-10gbit")] = str(path)
    assert main(arguments) != 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "tree has 32 hosts, 64 ranks need 64; use fewer ranks, or a larger topology" in said.err


@each(
    ("arguments", "words"),
    [
        (
            "--ranks=2 --strategies=data,spatial,filter,pipeline",
            ["\ndata 2 ", "\nspatial 2 ", "\nfilter 2 ", "\npipeline 2 "],
        ),
        (
            "--ranks=4 --explain=data=2,filter=2",
            ["stage3.2.conv2", "exchanges of layers, exposed", "memory of a rank"],
        ),
        ("--ranks=2 --strategies=data,filter --sweep=bandwidth", ["10 Gbit/s", "fastest that is"]),
        ("--ranks=1 --strategies=data --global-batch-size=20000000", [" TB of 64.0 GB"]),
    ],
)
def test_a_ranking_an_explanation_and_a_sweep_are_tables(arguments, words, capsys):
    out = run(capsys, *arguments.split())
    assert [word for word in words if word not in out] == []


def test_the_file_of_a_sweep_has_the_values_of_its_axis(capsys, tmp_path):
    path = tmp_path / "sweep.csv"
    run(capsys, "--ranks=2", "--strategies=data", "--sweep=latency,memory", "--csv", str(path))
    rows = [*csv.DictReader(path.read_text().splitlines())]
    values, others = (
        [float(row["value"]) for row in rows if row["axis"] == axis]
        for axis in ("latency", "memory")
    )
    assert others == pytest.approx([90e9 * 2.0**n for n in range(-3, 4)])  # not that of a rank
    assert len(values) == 7
    assert values == sorted(values)
    assert values[-1] == pytest.approx(64 * values[0])


@each(
    ("arguments", "words"),
    [
        (["--shape", "16 by 16"], "--shape: expected a shape"),
        (["--platform", "cpu-1gbi"], "cpu-1gbit"),
        (["--global-batch", "0"], "--global-batch-size: expected at least 1"),  # an old spelling
        (["--batch-per-rank", "4"], "--batch-size exclude each other"),
        (["--strategies", "model"], "strategy"),
        (["--explain", "data=128"], "one sample for each of 128 ranks"),
        (["--explain", "data"], "--explain must be axes with their ranks"),
        (["--sweep", "speed"], "bandwidth"),
        (["--plots", "folder"], "--plots has been removed: --csv FILE writes all predictions"),
    ],
)
def test_bad_input_is_one_sentence(capsys, arguments, words):
    assert main([*QUICK, "--ranks", "2", *arguments]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_limits_are_those_of_the_strategies_that_are_tried(capsys):
    def limits(*arguments: str) -> dict[str, str]:
        _, _, text = run(capsys, "--ranks", "1", *arguments).partition("limits: ")
        return {line.split()[0]: line for line in text.splitlines()[1:]}

    found = limits()
    assert [*found] == ["data", "spatial", "filter", "channel", "tensor", "pipeline"]
    assert "8 ranks" in found["pipeline"]
    assert "longer pipelines than 8 mostly wait" in found["pipeline"]
    assert [*limits("--strategies", "data,filter")] == ["data", "filter"]


def test_strategies_that_no_network_of_the_kind_can_use_are_not_counted(capsys):
    out = run(capsys, "--ranks", "4", "--top", "100")
    assert "context" not in out
    assert "expert" not in out
    asked = run(capsys, "--ranks", "4", "--strategies", "data,context")
    assert "1 more are not possible" in asked or "context 4: " in asked


def test_times_of_a_column_have_one_unit(capsys):
    assert main([*QUICK, "--ranks", "1-16", "--strategies", "data", "--global-batch", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith(("serial", "data "))][:5]
    units = {tuple(word for word in row if word in ("us", "ms", "s", "h")) for row in rows}
    assert len(rows) == 5
    assert len(units) == 1  # of the step, and of the epoch
