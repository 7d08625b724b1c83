import csv
import json

import pytest

from benchmarks.paradl.command import main
from tests.benchmarks.paradl.networks import ALEXNET


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "alexnet.net"
    path.write_text(ALEXNET)
    return str(path)


def test_the_table_has_published_and_corrected_values_beside_each_other(net, capsys):
    assert main([net, "--ranks", "2,4", "--batch-per-rank", "512", "--corrections"]) == 0
    title, blocks, heads, *rows = capsys.readouterr().out.splitlines()
    assert title == "AlexNet: 1280000 samples per epoch, platform abci"
    assert blocks.split() == ["published", "corrected"]
    assert heads.split().count("epoch/s") == 2
    data = next(row for row in rows if row.startswith("data ") and " 2 " in row)
    assert "6.2592776" in data
    assert any(row.startswith("overlap") for row in rows)


def test_results_are_written_as_json_and_csv(net, tmp_path, capsys):
    options = [net, "--strategies", "d,df", "--ranks", "4-8", "--formulas", "published"]
    for name in ("out.json", "out.csv"):
        assert main([*options, "--output", str(tmp_path / name)]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(r["strategy"], r["ranks"], r["groups"]) for r in rows] == [
        ("data", 4, 1),
        ("data", 8, 1),
        ("data+filter", 4, 1),
        ("data+filter", 8, 2),
    ]
    with (tmp_path / "out.csv").open() as file:
        assert [float(r["seconds"]) for r in csv.DictReader(file)] == [r["seconds"] for r in rows]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "none"], "--ranks: expected numbers such as 2,4 or 1-1024, got 'none'"),
        (["--formulas", "publish"], "--formulas: unknown formulas 'publish'"),
        (["--strategies", "x"], "paradl: unknown strategy 'x'"),
        (["--output", "out.txt"], "--output: expected a name that ends in .json or .csv"),
        (["--platform", "nowhere"], "unknown platform 'nowhere'"),
    ],
)
def test_wrong_options_are_one_line(net, capsys, options, message):
    assert main([net, *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
