"""The tests in several processes, and which cases of products of parameters are run."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import measure, side_by_side
from tests.conftest import repeating
from tests.each import each
from tests.side_by_side import MAX_REPORTED, SideBySide, main

ROOT = Path(__file__).parent.parent

MODULE = """
import os
from pathlib import Path
import pytest

@pytest.fixture
def broken():
    raise ValueError

@pytest.fixture(scope="module")
def process(request):
    found = {item.name for item in request.session.items if item.path == request.path}
    assert {"test_first", "test_last"} <= found
    return os.getpid()

def test_first(process, tmp_path_factory):
    print("said", tmp_path_factory.mktemp("a"))

def test_once(request):
    Path(request.path.stem).open("x").close()

def test_last(process):
    assert process == os.getpid() != PARENT
"""

BAD = """
def test_second():
    print("before it failed")
    assert [1] == [2]

def test_in_fixture(broken):
    pass

@pytest.mark.skip(reason="not now")
def test_skipped():
    pass

def test_crash():
    os._exit(3)

def test_behind():
    pass
"""


def test_each_test_runs_once_in_a_process_and_is_reported_by_another(pytester):
    module = MODULE.replace("PARENT", str(os.getpid()))
    for name in "abcdef":
        pytester.makepyfile(**{f"test_{name}": module + (BAD if name in "af" else "")})
    plugin = SideBySide()
    done = pytester.inline_run("-p", "no:cacheprovider", plugins=[plugin])
    passed, skipped, failed = done.listoutcomes()
    behind = [f"test_{name}.py::test_behind" for name in "af"]
    names = {report.nodeid for report in passed}
    assert len(passed) == len(names) == 6 * 3 + 2
    assert names > {*behind}
    assert [report.longrepr[2] for report in skipped] == ["Skipped: not now"] * 2
    tests = ("test_second", "test_in_fixture", "test_crash")
    bad = {f"test_{name}.py::{test}" for name in "af" for test in tests}
    assert {report.nodeid for report in failed} == bad == {*plugin.failed}
    assert len(plugin.failed) == len(bad)
    for report in failed:
        if "test_crash" in report.nodeid:
            assert report.longrepr == "the process that ran it ended with status 3"
        if "test_second" in report.nodeid:
            assert report.longrepr.reprcrash.message.startswith("assert [1] == [2]")
            assert report.capstdout == "before it failed\n"
    assert {path.name for path in pytester.path.iterdir()} >= {f"test_{name}" for name in "abcdef"}


@pytest.mark.parametrize("at_once", [1, 3])
def test_after_as_many_failures_as_are_allowed_all_processes_end(at_once, pytester, monkeypatch):
    monkeypatch.setattr(side_by_side, "AT_ONCE", at_once)
    pytester.makepyfile(**{f"test_{name}": "def test_it(): assert 0" for name in "abcdef"})
    done = pytester.inline_run("-x", "-p", "no:cacheprovider", plugins=[SideBySide()])
    assert 1 <= done.countoutcomes()[2] <= at_once
    assert done.ret == pytest.ExitCode.TESTS_FAILED


@each("ends", ["passes", "fails"])
def test_long_tests_are_last_and_run_only_if_the_others_pass(ends, pytester):
    pytester.makeini("[pytest]\nmarkers = long: is last")
    pytester.makepyfile(
        test_a="import pytest\n@pytest.mark.long\ndef test_a(): pass",
        test_b=f"def test_b(): assert {ends == 'passes'}",
    )
    done = pytester.inline_run("-p", "no:cacheprovider", plugins=[SideBySide()])
    ended = [report.nodeid for report in done.getreports() if report.when == "call"]
    assert ended == ["test_b.py::test_b", "test_a.py::test_a"][: 1 + (ends == "passes")]


def test_files_with_errors_are_named_and_nothing_runs(pytester):
    pytester.makepyfile(test_a="raise ValueError", test_b="def test_b(): pass")
    plugin = SideBySide()
    done = pytester.inline_run("-p", "no:cacheprovider", plugins=[plugin])
    assert (done.ret, plugin.failed) == (pytest.ExitCode.INTERRUPTED, {"test_a.py": ""})
    assert not done.listoutcomes()[0]


def test_the_commands_of_few_failed_tests_are_printed(monkeypatch, capsys):
    def run(arguments: list[str], plugins: list[SideBySide]) -> int:
        assert arguments == ["-q"]
        assert "PYTHONDONTWRITEBYTECODE" not in os.environ
        failed = [f"tests/test_a.py::test_it[{i} b-{{c}}]" for i in range(20)]
        plugins[0].failed |= dict.fromkeys(failed, " --fuzz-case 7")
        return 1

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(pytest, "main", run)
    assert main(["-q"]) == 1
    assert not sys.dont_write_bytecode
    *commands, rest = capsys.readouterr().out.splitlines()
    assert len(commands) == MAX_REPORTED
    assert commands[1].endswith(" -m pytest 'tests/test_a.py::test_it[1 b-{c}]' --fuzz-case 7")
    assert rest == f"failed: {20 - MAX_REPORTED} other tests"


SLOW_FILE = """
import time, pytest
@pytest.mark.measure
def test_slow(): time.sleep(0.02)
"""


@pytest.mark.parametrize(("budget", "status"), [(100, 0), (0.001, 1)])
def test_a_file_far_over_its_budget_fails(budget, status, pytester, monkeypatch):
    monkeypatch.setattr(measure, "DEFAULT_BUDGET_S", budget)
    pytester.makeini("[pytest]\nmarkers = measure: is slow")
    pytester.makepyfile(test_slow=SLOW_FILE)
    done = pytester.inline_run("-p", "no:cacheprovider", plugins=[measure.Budgets()])
    assert done.ret == status


def test_tests_beside_pytorch_are_left_out_where_it_is_not_installed():
    code = "import sys, pytest; sys.modules['torch'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "tests/parity", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "PyTorch is not installed; `make parity` installs it" in done.stdout


def cases_of(**values: list[Any]) -> list[Any]:
    """A test of a product of parameters, and one without any."""
    cases = [dict(zip(values, case, strict=True)) for case in product(*values.values())]
    return [SimpleNamespace(nodeid="test_plain")] + [
        SimpleNamespace(nodeid=f"test_it[{case}]", callspec=SimpleNamespace(params=case))
        for case in cases
    ]


@each(("n", "fewest"), [(1, 4), (2, 12), (3, 24)])
def test_cases_that_are_run_have_all_combinations_of_so_many_values(n, fewest):
    items = cases_of(a=[0, 1], b=[0, 1, 2], c=[0, 1, 2, 3])
    for item in items:
        item.get_closest_marker = lambda name: SimpleNamespace(args=(n,))
        item.iter_markers = lambda name: []
    runs = []
    for seed in (0, 202611290000):
        left_out = [id(item) for item in repeating(items, seed)]
        runs.append([item.nodeid for item in items if id(item) not in left_out])
        assert items[0].nodeid in runs[-1]
        assert fewest <= len(runs[-1]) - 1 <= 2 * fewest
    assert (runs[0] == runs[1]) == (n == 3)


def test_values_that_belong_together_are_one():
    items = cases_of(a=[0, 1, 2], b=[0, 1, 2])
    for item in items:
        item.get_closest_marker = lambda name: SimpleNamespace(args=(1,))
        item.iter_markers = lambda name: [SimpleNamespace(args=("a, b",))]
    assert not repeating(items)
