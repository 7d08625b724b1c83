"""The command line of traces."""

import json
import subprocess
import sys

import pytest

from pydtnn.tools.trace import main
from pydtnn.tools.tracing import summary
from tests.each import each
from tests.tools.tracing.synthetic import LAYERS, MS, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    write_run(
        folder / "run",
        steps=8,
        slower=lambda rank, *where: 8 * MS if (rank, where[-1]) == (2, "conv1 backward") else 0,
    )
    write_run(
        folder / "loader",
        steps=8,
        slower=lambda rank, *where: 8 * MS if (rank, where[-1]) == (3, "data") else 0,
    )
    return folder


def output(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def error(capsys, *arguments):
    assert main([*map(str, arguments)]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


SUMMARIES = {
    # two ranks, of which the second takes 8 ms longer in each of 8 steps
    2: """2 ranks on 1 host, 0.233 s: 8 steps of 2 epochs, median 29.120 ms
        clocks agree within 0.5 us
        rank 1 is slow in layer conv1 (backward): 13.000 ms per step, 5.000 ms on the other ranks
        step phase 16 0.458 s 0.000 s 28.620 ms 98.3%
        conv1 backward 16 0.144 s 0.144 s 9.000 ms 30.9%
        iallreduce call 32 0.000 s 0.000 s 0.010 ms 0.1% 93.8 KiB
        rank 0 0.166 s 71% 0.003 s 1% 0.064 s 28% 0.233 s 0.092 s
        rank 0 for rank 1 0.064 s
        rank 1 to rank 0 32 46.9 KiB
        conv2 backward 6.000 ms 2.00 1.00
        parallel efficiency 84.8% useful time over runtime
        transfer 98.6% time of messages and calls
        runtime 0.233 s, on an ideal network 0.230 s, useful at most 0.230 s
        layer conv1 (backward) rank 1 13.000 ms 44.6%
        8 of 8 steps were late because of rank 1, layer conv1 (backward): 8.000 ms beyond""",
    # one rank more than have lines of their own: each takes 8 ms longer than the one before
    5: """5 ranks on 3 hosts, 0.425 s: 8 steps of 2 epochs, median 53.120 ms
        rank 4 0.422 s
        ... and 1 ranks that wait neither most nor least""",
    1: """1 rank on 1 host, 0.166 s: 8 steps of 2 epochs, median 20.720 ms
        rank 0 0.166 s 100% 0.000 s 0% 0.000 s 0% 0.166 s 0.092 s""",
}


@each("ranks", SUMMARIES)
def test_numbers_of_a_summary_are_those_of_the_run(ranks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(summary, "MAX_RANKS", 1)
    late = {"conv1 backward": 8 * MS}
    run = {"ranks": ranks, "epochs": 2, "steps": 4}
    write_run(tmp_path, **run, slower=lambda rank, *at: rank * late.get(at[-1], 0))
    text = output(capsys, "summary", tmp_path)
    lines = "\n".join(" ".join(line.split()) for line in text.splitlines())
    for line in SUMMARIES[ranks].splitlines():
        assert f"\n{line.strip()}" in f"\n{lines}"
    assert (
        ("critical path" in text) == ("messages" in text) == ("clocks agree" in text) == (ranks > 1)
    )


def test_the_summary_names_the_rank_that_waits_for_its_batches(folder, capsys):
    text = output(capsys, "summary", folder / "loader")
    assert 'rank 3 is slow in phase "data": 8.500 ms per step, 0.500 ms on the other ranks' in text
    assert "its loader needs 12.000 ms per batch, the others 4.000 ms" in text
    assert text.count("is slow in") == 1


def test_tables_have_at_most_100_columns(tmp_path, capsys, monkeypatch):
    long = {
        f"stage{i}.block.residual.{'branch.' * 12}conv": times
        for i, times in enumerate(LAYERS.values())
    }
    monkeypatch.setattr("tests.tools.tracing.synthetic.LAYERS", long)
    write_run(tmp_path, ranks=7, steps=3, slower=lambda rank, *_: rank * MS)
    lines = output(capsys, "summary", tmp_path, "--top", 3).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("..." in line and "conv" in line for line in lines)
    assert "... and 3 more (--top 6)" in lines


def test_the_comparison_is_sorted_by_difference(folder, capsys):
    text = output(capsys, "compare", folder / "run", folder / "loader", "--top", 3)
    first, *rest = text.splitlines()
    assert first.startswith("a step takes ")
    assert "(8 steps, 4 ranks)" in first
    names = [line.split("  ")[0] for line in rest[2:4]]
    assert {*names} == {"layer conv1 (backward)", 'phase "data"'}
    assert rest[-1].startswith("... and ")


@pytest.mark.parametrize(
    ("format", "files"),
    [("chrome", ["trace.json"]), ("paraver", [f"trace{end}" for end in (".pcf", ".prv", ".row")])],
)
def test_an_export_writes_into_the_folder_of_the_trace(folder, tmp_path, capsys, format, files):
    before = {*(folder / "run").iterdir()}
    text = output(capsys, "export", folder / "run", "--to", format)
    assert sorted(path.name for path in {*(folder / "run").iterdir()} - before) == files
    assert "activities and 128 messages" in text
    path = tmp_path / "new" / "run.json"
    output(capsys, "export", folder / "run", "--to", "chrome", "--output", path)
    assert json.loads(path.read_text())["traceEvents"]


def test_mistakes_are_answered_in_one_sentence(folder, tmp_path, capsys):
    assert "give the folder of --trace" in error(capsys, "summary", tmp_path)
    assert "see python -m pydtnn trace export --help" in error(capsys, "export", tmp_path)
    assert "invalid choice" in error(capsys, "export", tmp_path, "--to", "pdf")
    assert "replay has been removed: training with" in error(capsys, "replay", tmp_path)
    assert "expected a number of rows from 1" in error(capsys, "summary", tmp_path, "--top", "0")
    (tmp_path / "file").touch()
    text = error(
        capsys, "export", folder / "run", "--to", "chrome", "--output", tmp_path / "file" / "x"
    )
    assert "cannot write" in text
    write_run(tmp_path / "empty", steps=0)
    text = error(capsys, "compare", folder / "run", tmp_path / "empty")
    assert "the second trace has no complete training step" in text


def test_the_module_is_a_program_and_needs_no_mpi(folder):
    code = "import sys; from pydtnn.tools.trace import main; main(sys.argv[1:])\n"
    code += "print(sorted({'mpi4py', 'optuna'} & {*sys.modules}))"
    command = [sys.executable, "-c", code, "summary", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "parallel efficiency" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
