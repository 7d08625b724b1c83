"""The check of a GPU, without one: its plan, judgements and report, with stand-ins."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_gpu_promises import FILE, row
from tests.each import each

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-c")


def part(name, code="pass", **options):
    from tests.gpu_check.parts import Part

    return Part(name, (*PYTHON, code), 0.1, 60.0, **options)


# -- test files


PASSED = "tests/test_a.py::test_x[cuda-float32] PASSED [ 50%]\ntests/test_a.py::test_y PASSED\n"
SUMMARY = "========= ERROR SUMMARY: {} errors\n"


@each(
    ("output", "status", "tool", "state", "told"),
    [
        (PASSED, 0, None, "passed", ""),
        (PASSED + "tests/test_a.py::test_z[a b] FAILED [100%]\n", 1, None, "failed", "test_z[a b]"),
        (PASSED + "Fatal Python error: Segmentation fault", -11, None, "failed", "Segmentation"),
        (PASSED + "tests/test_a.py::test_z ", None, None, "not done", "ended in tests/test_a.py::"),
        ("tests/t.py::test_x SKIPPED (no)\nSKIPPED [1] t.py:1: no GPU", 0, None, "empty", "no GPU"),
        (PASSED + SUMMARY.format(0), 0, "memcheck", "passed", ""),
        (PASSED + SUMMARY.format(2), 9, "memcheck", "failed", "memcheck: 2 errors"),
        (PASSED, 0, "memcheck", "failed", "status 0"),
        (
            PASSED + "========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n",
            0,
            "racecheck",
            "failed",
            "racecheck: 3 ",
        ),
        ("========= Error: Device not supported. Please", 1, "memcheck", "not done", "Device not"),
    ],
)
def test_the_output_of_pytest_and_of_a_sanitizer_is_judged(output, status, tool, state, told):
    from tests.gpu_check.suite import read

    result = read(output, status, tool)
    assert result.state == state
    assert told in " ".join(result.told)
    if output.startswith(PASSED):
        assert (result.passed, result.on_gpu) == (2, 1)


# -- the whole


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Call the check with other parts, and an environment that needs no setting up."""
    from tests.gpu_check import check as gpu_check

    def call(parts):
        monkeypatch.setattr(gpu_check, "parts", lambda *_: parts)
        monkeypatch.setattr(gpu_check, "setup_part", lambda *_: part("setup"))
        monkeypatch.setattr(gpu_check, "python_of", lambda _: Path(sys.executable))
        monkeypatch.setattr(gpu_check, "PROBE", "pass")
        monkeypatch.setattr(gpu_check, "settings", lambda *_: {})  # they would outlive the test
        monkeypatch.setattr("signal.signal", lambda *_: None)
        status = gpu_check.main(["--out", str(tmp_path / "out")])
        return status, (tmp_path / "out" / "report.md").read_text()

    return call


def writes(path, content):
    return f"import json; json.dump({content!r}, open({str(path)!r}, 'w')); print('written')"


def test_the_report_has_a_line_for_every_promise_and_says_what_did_not_run(
    stand_ins, tmp_path, capsys
):
    out = tmp_path / "out"
    steps = {"resnet44-128 float32": row(3, 1.5), "resnet44-128 bfloat16": row(2.0, 1.2)}
    status, report = stand_ins(
        [
            part("tests", writes(out / "tests.json", {"a.py": FILE})),
            part("steps", writes(out / "steps.json", steps), alone=True),
            part("cifar", "raise SystemExit('no data')", alone=True),
        ]
    )
    assert status == 1
    lines = {line.split("|")[1].strip(): line for line in report.splitlines() if "**" in line}
    assert len(lines) == 10
    assert lines["test suite, cuda backend"].endswith("**PASS** |")
    assert lines["ResNet-44, batch 128, to eager"].endswith("**FAIL** |")
    assert "resnet44-128 bfloat16 2.00" in lines["ResNet-44, batch 128, to eager"]
    assert lines["ResNet-44, batch 128, to compiled"].endswith("**PASS** |")
    assert "(cifar status 1)" in lines["ResNet-44 on CIFAR-10, one recipe"]
    assert "(not asked for)" in lines["NCCL, one rank"]
    assert "no data" in report
    assert "test suite, cuda backend" in capsys.readouterr().out


def test_the_plan_fits_into_the_budget_and_every_command_is_understood(tmp_path, capsys):
    from tests.gpu_check import check as gpu_check
    from tests.gpu_check.promises import PROMISES

    parts = gpu_check.parts(Path("python"), tmp_path, tmp_path, 570)
    alone = sum(one.expected for one in parts if one.alone)
    together = max(one.expected for one in parts if not one.alone)
    assert gpu_check.main(["--list"]) == 0
    assert "cifar" in capsys.readouterr().out
    setup = gpu_check.setup_part(tmp_path, None)
    assert setup.expected + together + alone <= 570
    for one in parts:
        dash, module, *options = one.command[1:]
        assert dash == "-m"
        importlib.import_module(module).arguments().parse_args(options)
        for word in (word for word in options if word.startswith("tests/")):
            file, _, name = word.partition("::")
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            assert not name or hasattr(module, name)
    names = {one.name for one in parts}
    assert {name for promise in PROMISES for name in promise.parts} <= names


def test_the_check_needs_nothing_but_python_before_its_environment_is_there(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.gpu_check import check, setup\n"
        "assert not {'numpy', 'pydtnn', 'torch'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
