"""Loggers of the library on the standard error of a command."""

import io
import logging

from pydtnn.tools.predict import main as predict
from pydtnn.train import main, show_logs
from tests.data.image_files import write_images
from tests.each import each
from tests.small_run import TINY


@each(
    ("options", "shown"),
    [
        ({"rank": 0}, ["w", "e"]),
        ({"rank": 0, "quiet": True}, ["e"]),
        ({"rank": 0, "verbose": True}, ["pydtnn.x: d", "pydtnn.x: w", "pydtnn.x: e"]),
        ({"rank": 2}, ["rank 2: w", "rank 2: e"]),
        ({"rank": 2, "verbose": True}, ["rank 2: w", "rank 2: e"]),
    ],
)
def test_levels_and_ranks(options, shown, capsys):
    log = logging.getLogger("pydtnn.x")
    with show_logs(**options):  # type: ignore[arg-type]
        log.debug("d")
        log.warning("w")
        log.error("e")
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in shown))
    log.debug("later")
    assert "later" not in capsys.readouterr().err
    assert not logging.getLogger("pydtnn").handlers


def test_what_a_line_quotes_is_not_executed_by_a_terminal(capsys):
    with show_logs(0):
        logging.getLogger("pydtnn.x").warning("class %s\x07", "\x1b[2J")
    assert capsys.readouterr().err == "class \\x1b[2J\\x07\n"


def test_a_full_disk_of_the_output_is_a_warning(tmp_path, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main([*TINY, f"--output-dir={tmp_path}"]) == 0
        full.flush()  # goes nowhere
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "/dev/full cannot be written: no space left on device; the run continues"
    assert len([*tmp_path.glob("checkpoint-*")]) == 2


def test_names_are_printed_in_any_encoding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "data")
    for part in ("train", "val"):
        (tmp_path / "data" / part / "ant").rename(tmp_path / "data" / part / "\u00e9t\u00e9")
    options = ["--model=mlp", "--dataset=folder", "--data-dir=data", "--image-size=6"]
    options += ["--epochs=1", "--batch-size=8", "--threads=1", "--metrics=confusion_matrix"]
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    assert main([*options, "--save=m.pydtnn"]) == 0, capsys.readouterr().err
    output.seek(0)
    assert "\\xe9t\\xe9" in output.read()
    image = "data/val/\u00e9t\u00e9/0.png"
    assert predict(["m.pydtnn", image, "--top=3"]) == 0
    output.seek(0)
    assert "data/val/\\xe9t\\xe9/0.png: " in output.read()
