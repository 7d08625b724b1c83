"""Cases in one test: all are run, the one that fails is named, a simulated GPU runs a few."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests import gpu
from tests.each import each


def test_all_rows_of_all_parameters_are_run_and_the_one_that_fails_is_named():
    seen = []

    @each("a", "xy")
    @each("b, c", [(1, 2), (3, 4)])
    def test(fixture: str, a: str, b: int, c: int) -> None:
        seen.append((fixture, a, b, c))
        assert (a, b) != ("y", 3)

    with pytest.raises(AssertionError) as caught:
        test(fixture="f")
    assert caught.value.__notes__ == ["a = 'y', b = 3, c = 4"]
    assert seen == [("f", "x", 1, 2), ("f", "x", 3, 4), ("f", "y", 1, 2), ("f", "y", 3, 4)]


def test_it_is_skipped_where_every_case_is():
    def test(case: int) -> None:
        if case:
            pytest.skip(f"case {case}")

    each("case", [1, 0])(test)()
    with pytest.raises(pytest.skip.Exception, match="case 1"):
        each("case", [1, 2])(test)()


def test_a_few_cases_are_run_apart_from_the_others():
    seen = []
    run = each("case", range(10), few=3)(lambda case: seen.append(case))
    run(part="few")
    assert seen == [1, 5, 8]
    run(part="others")
    assert sorted(seen) == [*range(10)]


def test_mistakes_are_refused():
    for names, values in (("b", [1]), ("a", [])):
        with pytest.raises(pytest.UsageError, match="no parameters or no values of"):
            each(names, values)(lambda a: None)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        each("a, b", [(1, 2, 3)])


def test_a_simulated_gpu_runs_some(monkeypatch):
    seen: dict[str, list[int]] = {"cpu": [], "cuda": []}

    @each("case", range(10))
    def test(backend: SimpleNamespace, case: int) -> None:
        seen[backend.name].append(case)

    monkeypatch.setattr(gpu, "why_not", lambda: "there is none")
    for name in seen:
        test(backend=SimpleNamespace(name=name))
    assert seen["cpu"] == [*range(10)]
    assert len({*seen["cuda"]}) == 2


@each("case", range(3))
def test_a_case_does_not_see_what_the_last_has_left(tmp_path, capsys, monkeypatch, case):
    assert [*tmp_path.iterdir()] == []
    assert capsys.readouterr().out == ""
    assert "PYDTNN_LEFT" not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYDTNN_LEFT", "1")
    print(case)
