"""Pictures of pipeline schedules, and the command that draws and checks them."""

import pytest

from pydtnn.model.pipeline import check
from pydtnn.tools.schedules.pipeline import main
from pydtnn.tools.schedules.pipeline_picture import draw, title


def test_the_text_of_a_vector_picture_stays_text(tmp_path):
    pytest.importorskip("matplotlib")
    draw(path := tmp_path / "picture.svg", "gpipe", done := check("gpipe", 2, 2))
    content = path.read_text()
    assert all(f">{part}<" in content for part in title("gpipe", done).split(": ", 1))


def test_pictures_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in one of \.png, \.pdf, \.svg, got "):
        draw(tmp_path / "a.gif", "gpipe", check("gpipe", 2, 2))
    with pytest.raises(ValueError, match="at most 2048 actions in a picture, got 2400"):
        draw(tmp_path / "a.png", "gpipe", check("gpipe", 12, 100))


def test_the_command_shows_and_proves(capsys):
    assert main(["draw", "1f1b", "--ranks=2", "--micro-batches=3"]) == 0
    assert "stage 1     f0 b0 b0 f1 b1 b1" in capsys.readouterr().out
    assert main(["check", "1f1b"]) == 0
    assert capsys.readouterr().out.startswith("correct: 1f1b: 4 stages, 8 micro-batches, 27 %")


def test_the_command_refuses_a_broken_schedule_of_ones_own(tmp_path, capsys):
    source = tmp_path / "own.py"
    source.write_text(
        "from pydtnn.model.pipeline import backward, forward\n"
        "def half(stage, stages, micro_batches):\n"
        "    return [*map(forward, range(micro_batches))]\n"
    )
    assert main(["check", f"{source}:half"]) == 1
    error = capsys.readouterr().err
    assert error == "pydtnn model.pipeline: stage 0 lacks backward 0; add it\n"
