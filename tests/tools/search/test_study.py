"""The study that groups of ranks share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydtnn.tools.search import make_space
from pydtnn.tools.search.study import (
    CHOICE,
    JOURNAL,
    LOCKS,
    MAX_STARTS,
    SharedStudy,
    TakenTrial,
    lock_of,
)
from tests.each import each

pytest.importorskip("optuna")

GROUP = {"host": "here", "job": 1, "ranks": [0]}
RANGE = {"x": {"low": 0.0, "high": 1.0}, "n": [1, 2, 3]}
GOAL = {"minimize": "y"}


def shared(folder: Path, **options: Any) -> SharedStudy:
    return SharedStudy(folder, make_space(RANGE, **({"objective": GOAL, "trials": 6} | options)))


def begun(own: SharedStudy, group: dict[str, Any] = GROUP) -> TakenTrial:
    """The next trial of a group."""
    taken = own.take(group)
    assert taken is not None
    return taken


def values(own: SharedStudy) -> list[Any]:
    return [(one.params, one.values, one.state.name) for one in own.study.trials]


def search(own: SharedStudy) -> None:
    while (taken := own.take(GROUP)) is not None:
        own.tell(taken.number, {"y": (taken.values["x"] - 0.5) ** 2}, {})


@each("sampler", ["tpe", "quasi-random", "nsga2"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_same_seed_gives_the_same_trials_also_if_interrupted(sampler, tmp_path):
    options: dict[str, Any] = {"sampler": sampler, "trials": 12}
    whole = shared(tmp_path / "whole", **options)
    search(whole)
    for number in range(12):
        own = shared(tmp_path / "parts", **options)
        if number == 3:
            own.study.ask()  # killed before it has chosen values
        taken = begun(own)
        own.close()
        own = shared(tmp_path / "parts", **options)
        again = begun(own, GROUP | {"job": 2})
        assert (again.number, again.values) == (number, taken.values)
        assert again.resumed
        own.tell(number, {"y": (again.values["x"] - 0.5) ** 2}, {"epochs": 3})
    assert values(own) == values(whole)
    assert own.take(GROUP) is None
    attributes = own.study.trials[5].user_attrs
    first, second = attributes["group"]
    assert (first["job"], first["end"], second["job"], attributes["epochs"]) == (1, None, 2, 3)
    assert second["end"] >= second["begin"]


def test_workers_never_have_the_same_trial(tmp_path):
    one, two = shared(tmp_path), shared(tmp_path)
    found = [own.take(GROUP) for _ in range(3) for own in (one, two)]
    assert sorted(taken.number for taken in found if taken) == [*range(6)]
    opened = len(os.listdir("/proc/self/fd"))
    assert one.take(GROUP) is None
    assert len(os.listdir("/proc/self/fd")) == opened
    two.close()
    assert begun(one).number == 1


def test_a_trial_that_ends_its_job_is_given_up(tmp_path):
    for _ in range(MAX_STARTS):
        own = shared(tmp_path)
        assert begun(own).number == 0
        own.close()
    own = shared(tmp_path)
    assert begun(own).number == 1
    failed = own.study.trials[0]
    assert failed.state.name == "FAIL"
    assert failed.user_attrs["reason"].startswith(f"its job has ended {MAX_STARTS} times")
    for epoch in range(2 * MAX_STARTS):  # one that goes on is not
        own.report(1, 1.0, epoch + 1)
        own.close()
        own = shared(tmp_path)
        assert begun(own).number == 1
    lock_of(tmp_path, 1).write_text("rank 1: no memory")
    own.close()
    own = shared(tmp_path)
    assert begun(own).number == 2
    assert own.study.trials[1].user_attrs["reason"] == "rank 1: no memory"
    own.close()
    lock_of(tmp_path, 2).unlink()
    lock_of(tmp_path, 2).symlink_to("/dev/zero")
    with pytest.raises((OSError, ValueError), match="a link to /dev/zero|symbolic links"):
        shared(tmp_path).take(GROUP)


def test_a_trial_of_a_grid_that_nobody_has_begun_is_not_lost(tmp_path):
    space = make_space({"a": [1, 2], "b": ["x", {"y": 1}]}, objective=GOAL, sampler="grid")
    own = SharedStudy(tmp_path, space)
    own.study.enqueue_trial(space.stored({"a": 1, "b": "x"}))  # killed before it has asked
    found = []
    while (taken := own.take(GROUP)) is not None:
        found.append(taken.values)
        own.tell(taken.number, {"y": 0.0}, {})
    assert found == space.grid()


def test_a_study_ends_with_its_goal_or_its_time(tmp_path):
    own = shared(tmp_path, stop={"y": 0.1})
    own.take(GROUP)
    own.tell(0, {"y": 0.2}, {})
    own.take(GROUP)
    own.tell(1, {"y": 0.1}, {})
    assert own.take(GROUP) is None
    late = SharedStudy(tmp_path, make_space(RANGE, objective=GOAL, stop={"after": "1 ns"}))
    assert late.take(GROUP) is None


def test_the_best_third_of_the_trials_continues_at_each_rung(tmp_path):
    """Optuna decides; a trial whose process was killed is compared once."""
    own = shared(tmp_path, pruner="asha", sampler="random", trials=9)
    last = {}
    for number in range(9):
        taken = begun(own)
        y = abs(taken.values["x"] - 0.3)
        for epoch in range(1, 10):
            if number == 4 and epoch == 3:
                own.close()
                own = shared(tmp_path, pruner="asha", sampler="random", trials=9)
                assert begun(own).number == 4
            ends = own.report(number, y, epoch)
            if ends:
                break
        last[number] = epoch
        own.prune(number, {}) if ends and epoch < 9 else own.tell(number, {"y": y}, {})
    costs = [abs(one.params["x"] - 0.3) for one in own.study.trials]
    for number, epoch in last.items():
        better = sum(cost < costs[number] for cost in costs[:number])
        assert epoch == (9 if better < max(1, (number + 1) // 3) else 3)
    assert {one.state.name for one in own.study.trials} == {"COMPLETE", "PRUNED"}


def test_a_line_that_a_failed_host_did_not_finish_is_cut(tmp_path):
    shared(tmp_path).take(GROUP)
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[: whole.index(b"\n") - 3])
    own = shared(tmp_path)
    assert begun(own).number == 1
    assert journal.read_bytes().startswith(whole)


def test_a_study_of_another_space_is_refused(tmp_path):
    shared(tmp_path).take(GROUP)
    with pytest.raises(ValueError, match="contains a study of another space"):
        shared(tmp_path, seed=1)
    assert shared(tmp_path, trials=7).take(GROUP) is not None


@each(
    ("options", "message"),
    [
        ({"pruner": "ash"}, "unknown pruner 'ash'; did you mean 'asha'"),
        ({"sampler": {"name": "tpe", "foo": 1}}, "sampler tpe: .*'foo'"),
        ({"pruner": {"name": "asha", "reduction_factor": 1}}, "pruner asha: .*reduction"),
        ({"sampler": "pbt"}, "unknown sampler 'pbt'; choose one of"),
    ],
)
def test_an_unknown_sampler_or_option_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        shared(tmp_path / "study", **options)
    assert not (tmp_path / "study").exists()


def test_a_trial_that_ends_while_another_is_chosen_is_not_continued(tmp_path, monkeypatch):
    first, second = shared(tmp_path), shared(tmp_path)
    first.take(GROUP)
    claim = second._claim

    def ended_before(number: int) -> bool:
        if number == 0:
            first.tell(0, {"y": 0.5}, {})
        return claim(number)

    monkeypatch.setattr(second, "_claim", ended_before)
    taken = begun(second)
    assert (taken.number, taken.resumed) == (1, False)
    assert second.study.trials[0].values == [0.5]


def change_line(line: bytes, old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        at = next(number for number, one in enumerate(lines) if line in one and old in one)
        lines[at] = lines[at].replace(old, new)
        return b"".join(lines)

    return change


@each(
    ("change", "problem"),
    [
        (change_line(b"", b'"op_code":4', b'"op_code":99'), "AssertionError"),
        (change_line(b'"end":1', b'"begin"', b'"x"'), "KeyError: 'begin'"),
        (change_line(b'"end":1', b'"ranks":[0]', b'"ranks":[]'), "trial 0 has wrong ranks"),
        (change_line(b"", b"{", b"\xff"), "UnicodeDecodeError"),
    ],
)
def test_a_damaged_line_of_a_journal_is_a_sentence_with_the_file(change, problem, tmp_path):
    own = shared(tmp_path)
    search(own)
    own.close()
    file = tmp_path / JOURNAL
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"^search: .*/{JOURNAL} is damaged .*{problem}.*re"):
        shared(tmp_path)


def test_a_journal_is_neither_a_pipe_nor_a_link_that_leaves_its_folder(tmp_path):
    folder, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    folder.mkdir()
    os.mkfifo(folder / JOURNAL)
    with pytest.raises(OSError, match="search: expected a regular file, got the named pipe"):
        shared(folder)
    for name in (JOURNAL, LOCKS, f"{LOCKS}/{JOURNAL}", f"{LOCKS}/{CHOICE}"):
        shutil.rmtree(folder)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(elsewhere)
        with pytest.raises((OSError, ValueError), match="a link to|symbolic links"):
            shared(folder)
        assert not elsewhere.exists()
