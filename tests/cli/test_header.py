"""What a run prints before the first step."""

import shlex

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parser import parse
from pydtnn.cli.report import not_default
from pydtnn.train import first_line, main
from pydtnn.utils.version import __version__
from tests.each import each
from tests.small_run import TINY


def test_the_first_line_says_what_is_trained_on_how_many_ranks():
    config = TrainConfig(model="resnet20", dataset="digits")
    start = f"pydtnn {__version__}: "
    assert first_line(config, 1) == f"{start}training of resnet20 on digits, 1 rank"
    config = TrainConfig(load="file", evaluate_only=True)
    assert first_line(config, 3) == f"{start}evaluation of resnet44 on synthetic, 3 ranks"


def test_the_header_describes_the_run(tmp_path, capsys):
    assert main([*TINY, "--epochs=1", f"--output-dir={tmp_path}", "--dtype=float64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = dict(line.split("  ", 1) for line in lines[1 : lines.index("", 1) - 1])
    rows = {name: value.strip() for name, value in header.items()}
    assert rows["model"] == "mlp, 338,948 parameters"
    assert rows["data"].startswith("synthetic, 120 training and 40 validation samples of 12 x 12")
    assert rows["batch"] == "16 per rank, 16 in total; 1 epoch of 8 steps"
    assert rows["ranks"] == "1 x 1 thread on 1 host"
    assert (rows["device"][:5], rows["device"][-9:]) == ("cpu (", ", float64")
    assert rows["run folder"] == str(tmp_path)
    words = shlex.split(rows["options"])
    assert parse([*words, f"--output-dir={tmp_path}", "--model=mlp"]) == parse(
        [*TINY, "--epochs=1", f"--output-dir={tmp_path}", "--dtype=float64"]
    )


@each(
    "arguments",
    [
        ["--no-overlap", "--cuda-aware", "--comm=mpi", "--device=cuda", "--no-tf32"],
        ["--model-options={a: 'b c'}", "--augment=crop:4,flip", "--lr=1e-3", "--metrics="],
        ["--save=a file", "--optimizer-options.nesterov=true", "--early-stopping=2"],
    ],
)
def test_the_options_that_are_not_the_default_can_be_typed_again(arguments):
    config = parse(arguments)
    assert parse(shlex.split(not_default(config))) == config
    assert not_default(TrainConfig()) == ""


def test_the_result_is_all_that_a_quiet_run_prints(tmp_path, capsys):
    options = ["--quiet", f"--output-dir={tmp_path}"]
    assert main([*TINY, *options]) == 0
    printed, told = capsys.readouterr()
    (line,) = printed.splitlines()
    assert line.startswith("loss ")
    assert "  val_accuracy " in line
    assert told == ""
    assert main(["--quiet", "--resume", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"{line}\n", "")
    assert main(["--quiet", "--resume", str(tmp_path), "--evaluate-only"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@each(("style", "lines"), [("plain", 1), ("none", 0)])
def test_progress_is_shown_as_requested(style, lines, tmp_path, capsys):
    assert main([*TINY, "--epochs=1", f"--progress={style}", f"--output-dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("\nepoch ") == lines


def test_the_first_line_does_not_wait_for_the_data(tmp_path, capsys, monkeypatch):
    """Nor for anything else that takes time."""
    (tmp_path / "own.py").write_text(
        "def load():\n    print('data')\n    raise ValueError('stop')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["--dataset=own.py:load"]) == 1
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("pydtnn ")
    assert second == "data"
