"""Schedules as text and pictures, and the command line that shows and checks them."""

import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from pydtnn.cli import parallel
from pydtnn.cli.config import TrainConfig
from pydtnn.comm import run_threads
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.tools.schedules import check as proof
from pydtnn.tools.schedules.allreduce import main
from pydtnn.tools.schedules.allreduce_picture import busiest, draw, text, title
from pydtnn.tools.schedules.check import check
from pydtnn.utils.errors import RankError
from tests.each import each

HIERARCHICAL = """\
hierarchical of 4 ranks on 2 hosts: 4 rounds; each rank sends 1.5 n in 4 messages
the array of n bytes is in 4 equal parts, 0 to 3
k +> r: sends k to rank r, which adds it to its own
k => r: sends k to rank r, which takes it instead of its own

       host 0             | host 1
round  rank 0    rank 1   | rank 2    rank 3
    0  2-3 +> 1  0-1 +> 0 | 2-3 +> 3  0-1 +> 2
    1  1 +> 2    3 +> 3   | 0 +> 0    2 +> 1
    2  0 => 2    2 => 3   | 1 => 0    3 => 1
    3  0-1 => 1  2-3 => 0 | 0-1 => 3  2-3 => 2
"""

WATCHER = """
from pydtnn.comm.schedules.steps import ALL, add, send

def neighbours(group):
    \"\"\"Swap whole arrays between two.\"\"\"
    yield send(1 - group.rank, ALL), add(1 - group.rank, ALL)

number = 3
"""


def test_a_schedule_is_a_table_of_who_sends_what_to_whom():
    hosts = (0, 0, 1, 1)
    assert text("hierarchical", check("hierarchical", hosts), hosts) + "\n" == HIERARCHICAL


def test_titles_of_other_schedules():
    assert text("ring", check("ring", 1), ["a"]) == "ring of 1 rank: 0 rounds; nothing is sent"
    assert "the busiest rank sends 3 n" in title("tree", check("binomial_tree", 8), range(8))
    assert busiest([]) == 0


STAR = """
from pydtnn.comm.schedules.steps import ALL, add, send

def star(group):
    if group.rank:
        yield (send(0, ALL),)
    else:
        yield tuple(add(rank, ALL) for rank in range(1, group.size))
"""


def test_training_refuses_an_algorithm_that_is_no_allreduce(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "find_tool", lambda *names: proof)
    (tmp_path / "star.py").write_text(STAR)
    config = TrainConfig(allreduce=f"{tmp_path / 'star.py'}:star")
    with pytest.raises(RankError, match="rank 1 lacks the contribution of rank 0"):
        run_threads(2, partial(parallel.choose_allreduce, config))


def test_the_proof_is_found_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pydtnn.tools"]["schedules"] == proof.__name__


# -- pictures --------------------------------------------------------------------------------------


def test_schedules_can_be_drawn_and_the_text_of_a_vector_picture_stays_text(tmp_path):
    pytest.importorskip("matplotlib")
    for hosts in ((0, 0, 1, 0, 2), (0,), (0, 1)):
        draw(tmp_path / "picture.png", "torus", check("torus", hosts), hosts)
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    draw(tmp_path / "ring.svg", "ring", check("ring", 3), "aab")
    drawn = (tmp_path / "ring.svg").read_text()
    for words in ("ring of 3 ranks on 2 hosts", "host a", "host b", "round 0", "round 3", "n/3"):
        assert f">{words}<" in drawn
    assert ">round 4<" not in drawn
    draw(tmp_path / "ring.pdf", "ring", check("ring", 3), "aab")
    assert (tmp_path / "ring.pdf").read_bytes().startswith(b"%PDF")


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    two = check("ring", 2)
    with pytest.raises(ValueError, match=r"must end in one of \.png, \.pdf, \.svg, got "):
        draw(tmp_path / "ring.gif", "ring", two, "ab")
    with pytest.raises(ValueError, match="expected at most 16 ranks as text, got 17"):
        text("ring", check("ring", 17), range(17))
    with pytest.raises(ValueError, match="expected at most 32 ranks in a picture, got 33"):
        draw(tmp_path / "ring.png", "ring", check("ring", 33), range(33))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it then raises ImportError
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        draw(tmp_path / "ring.png", "ring", two, "ab")


# -- the command line ------------------------------------------------------------------------------


def test_list_names_every_schedule_and_says_what_it_does(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEDULES)
    assert all(len(line.split()) > 5 and line.endswith(".") for line in lines)


@each("hosts", ["2x2", "2,2"])
def test_draw_prints_the_table(hosts, capsys):
    assert main(["draw", "hierarchical", "--hosts", hosts]) == 0
    assert capsys.readouterr().out == HIERARCHICAL


def test_check_tells_for_each_number_of_ranks_that_a_schedule_is_right(capsys):
    assert main(["check", "fixed_tree", "-np", "1-3"]) == 0
    one, two, three = capsys.readouterr().out.splitlines()
    assert one == "correct: fixed_tree of 1 rank: 0 rounds; nothing is sent"
    assert two.endswith("each rank sends n in 2 messages; all is added as (0 + 1)")
    assert three.endswith("all is added as ((0 + 1) + 2)")
    assert main(["check", "ring", "--hosts", "2,1"]) == 0
    told = capsys.readouterr().out
    assert "on 2 hosts: 4 rounds" in told
    assert told.endswith("parts are added in 3 orders\n")


def test_a_function_in_a_file_of_ones_own_can_be_drawn_and_checked(tmp_path, capsys):
    (tmp_path / "own.py").write_text(WATCHER)
    own = f"{tmp_path / 'own.py'}:neighbours"
    assert main(["draw", own, "-np", "2"]) == 0
    assert "neighbours of 2 ranks" in capsys.readouterr().out
    assert main(["check", own, "-np", "2-3"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("correct: neighbours of 2 ranks")
    assert printed.err.startswith("pydtnn comm: neighbours of 3 ranks: round 0 of rank ")
    assert printed.err.count("\n") == 1


MISTAKES = {
    "check rink": "unknown allreduce schedule 'rink'; did you mean 'ring'?",
    "draw ring -np many": "-np must be a number of ranks or a range as in 1-17, got many",
    "draw ring -np 2-3": "-np must be one number, got 2-3",
    "check ring -np 5-3": "-np must be from 1 to 1024, the smaller number first, got 5-3",
    "draw ring --hosts 4y2": "--hosts must be hosts x ranks as in 4x2, or ranks as in 2,1,2",
    "draw ring --hosts 2,0": "--hosts must be hosts x ranks",
    "draw ring --hosts 99x99": "--hosts must have at most 1024 ranks, got 99x99",
    "draw ring --hosts 2x2 -np 3": "-np must be 4 as --hosts 2x2 has 4 ranks, got 3",
    "draw none.py:f": "allreduce schedule: file none.py does not exist",
    "draw {own}:number": "allreduce schedule {own}:number: expected a function that yields rounds",
    "draw ring --colour": "unrecognized arguments: --colour; see python -m pydtnn comm --help",
    "": "the following arguments are required: {{list,draw,check}}",
}


@each("command", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(command, tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(WATCHER)
    assert main(command.format(own=own).split()) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"pydtnn comm: {MISTAKES[command].format(own=own)}")
    assert printed.err.count("\n") == 1
