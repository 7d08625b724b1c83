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

from tests import measure
from tests.conftest import repeating
from tests.each import each
from tests.side_by_side import MAX_REPORTED, NO_TESTS, report

ROOT = Path(__file__).parent.parent
RUN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests import side_by_side
side_by_side.OTHERS = (("tests/comm",), ("tests/cli",), ("tests/long",))
sys.exit(side_by_side.main(["-q", "-p", "no:cacheprovider", "-m", "not slow"]))
"""


FILES = ("tests/comm/test_ranks.py", "tests/cli/test_options.py", "tests/test_other.py")


@pytest.mark.few(1)
@pytest.mark.parametrize("failing", [None, *FILES])
def test_every_test_runs_once_and_a_failure_in_any_process_counts(
    failing: str | None, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: is left out\n")
    for path in FILES:
        name = Path(path).stem
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(
            f"import pytest\ndef {name}():\n    open('{name}', 'x').close()\n"
            "    import os\n    assert 'PYTHONDONTWRITEBYTECODE' not in os.environ\n"
            f"    assert {path != failing}\n@pytest.mark.slow\ndef test_slow():\n    assert False\n"
        )
    (tmp_path / "tests" / "long").mkdir()
    slow = "import pytest\n@pytest.mark.slow\ndef test_slow():\n    assert False\n"
    (tmp_path / "tests" / "long" / "test_long.py").write_text(slow)
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (failing is not None), done.stdout + done.stderr
    assert all((tmp_path / Path(path).stem).exists() for path in FILES)
    assert done.stdout.count("1 deselected") == 4
    last = done.stdout.splitlines()[-1]
    command = f"failed: {os.path.relpath(sys.executable, tmp_path)} -m pytest {failing}"
    assert last.startswith(command) if failing else not last.startswith("failed")


def test_the_commands_of_few_failed_tests_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [f"FAILED tests/test_a.py::test_it[{i} b-{{c}}] - assert 0 - 1" for i in range(20)]
    report("\n".join(["tests/test_a.py F", *failed, "ERROR tests/test_b.py", "20 failed"]))
    *commands, rest = capsys.readouterr().out.splitlines()
    assert len(commands) == MAX_REPORTED
    assert commands[1].endswith(" -m pytest 'tests/test_a.py::test_it[1 b-{c}]'")
    assert rest == f"failed: {21 - MAX_REPORTED} other tests"


SLOW_FILE = """
import time, pytest
@pytest.mark.measure
def test_slow(): time.sleep(0.02)
"""


@pytest.mark.parametrize(("budget", "status"), [(100, 0), (0.001, 1)])
def test_a_file_far_over_its_budget_fails(
    budget: float, status: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "DEFAULT_BUDGET_S", budget)
    pytester.makeini("[pytest]\nmarkers = measure: is slow")
    pytester.makepyfile(test_slow=SLOW_FILE)
    done = pytester.inline_run("-p", "no:cacheprovider", plugins=[measure.Budgets()])
    assert done.ret == status


def test_tests_beside_pytorch_are_left_out_where_it_is_not_installed() -> None:
    code = "import sys, pytest; sys.modules['torch'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "tests/parity", "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == NO_TESTS, done.stdout + done.stderr
    assert "PyTorch is not installed; `make parity` installs it" in done.stdout


def cases_of(**values: list[Any]) -> list[Any]:
    """A test of a product of parameters, and one without any."""
    cases = [dict(zip(values, case, strict=True)) for case in product(*values.values())]
    return [SimpleNamespace(nodeid="test_plain")] + [
        SimpleNamespace(nodeid=f"test_it[{case}]", callspec=SimpleNamespace(params=case))
        for case in cases
    ]


@each(("n", "fewest"), [(1, 4), (2, 12), (3, 24)])
def test_cases_that_are_run_have_all_combinations_of_so_many_values(n: int, fewest: int) -> None:
    items = cases_of(a=[0, 1], b=[0, 1, 2], c=[0, 1, 2, 3])
    for item in items:
        item.get_closest_marker = lambda name: SimpleNamespace(args=(n,))
        item.iter_markers = lambda name: []
    left_out = [id(item) for item in repeating(items)]
    run = [item for item in items if id(item) not in left_out]
    assert items[0] in run
    assert fewest <= len(run) - 1 <= 2 * fewest


def test_values_that_belong_together_are_one() -> None:
    items = cases_of(a=[0, 1, 2], b=[0, 1, 2])
    for item in items:
        item.get_closest_marker = lambda name: SimpleNamespace(args=(1,))
        item.iter_markers = lambda name: [SimpleNamespace(args=("a, b",))]
    assert not repeating(items)
