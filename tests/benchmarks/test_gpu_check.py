"""The check of a GPU, without one: its parts, limits, judgements and report, with stand-ins."""

import importlib
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.each import each

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-c")


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def part(name, code="pass", expected=0.1, limit=30.0, **options):
    from tests.gpu_check.parts import Part

    return Part(name, (*PYTHON, code), expected, limit, **options)


def run(parts, folder, seconds=60.0):
    from tests.gpu_check import parts as gpu_parts

    told = []
    gpu_parts.run(
        parts,
        folder,
        time.monotonic() + seconds,
        lambda: told.append([one.state for one in parts]),
    )
    return told


# -- parts


def test_parts_run_to_their_end_and_each_end_is_told(tmp_path):
    parts = [
        part("good", "print('fine')"),
        part("bad", "raise SystemExit(3)"),
        part("timed", "import os; print(os.environ['GPU_CHECK_SECONDS'])", limit=20, alone=True),
    ]
    told = run(parts, tmp_path)
    assert [one.state for one in parts] == ["done", "status 3", "done"]
    assert parts[0].tail(5) == ["fine"]
    assert parts[2].tail(5) == ["20"]
    assert told[-1] == ["done", "status 3", "done"]
    assert all(states[2] == "waiting" for states in told if "running" in states[:2])


def test_a_part_that_does_not_end_is_ended_with_all_that_it_has_started(tmp_path):
    from benchmarks.common.processes import lives
    from tests.gpu_check.parts import run as run_parts

    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                         start_new_session=True)\n"
        "print('begun', flush=True)\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    waits = f"while not open({str(child)!r}, 'a+').tell(): pass"
    hanging, other = part("hanging", code, limit=600), part("other", waits, limit=600)
    over = time.monotonic() + 600
    run_parts([hanging, other], tmp_path, over, lambda: setattr(hanging, "limit", 0.0))
    assert hanging.state.startswith("ended after")
    assert hanging.tail(1) == ["begun"]
    assert other.state == "done"
    assert not lives(int(child.read_text()))


def test_what_cannot_be_started_says_so_and_late_parts_are_left_out(tmp_path):
    from tests.gpu_check.parts import Part

    missing = Part("missing", (str(tmp_path / "nothing"),), 1, 1, alone=True)
    late = part("late", expected=600, alone=True)
    run([missing, late], tmp_path, seconds=100)
    assert missing.state.startswith("not started: ")
    assert "nothing" in missing.state
    assert late.state.startswith("not started: it takes about 600 s, ")


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


def test_files_are_tested_side_by_side_and_what_happened_to_each_is_written(tmp_path):
    from tests.gpu_check.suite import Result, run, summary

    for name, body in {
        "good": "assert True",
        "bad": "assert False",
        "crash": "import os; os.abort()",
        "skipped": "import pytest; pytest.skip('no GPU here')",
    }.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    files = [str(path) for path in sorted(tmp_path.glob("test_*.py"))]
    found = tmp_path / "found.json"
    results = run(files, workers=4, limit=600, found=found)
    states = {Path(file).stem[5:]: Result(**r) for file, r in json.loads(found.read_text()).items()}
    expected = {"bad": "failed", "crash": "failed", "good": "passed", "skipped": "empty"}
    assert {name: result.state for name, result in states.items()} == expected
    assert "no GPU here" in states["skipped"].told[0]
    told = summary(results)
    assert told.startswith("1 tests passed (0 of them on the GPU), 1 failed, 1 skipped; files: ")


# -- the whole


FILE = {"state": "passed", "passed": 3, "on_gpu": 2, "failed": 0, "skipped": 0, "told": []}


def row(eager, compiled, failed=None):
    ratio = {"eager": eager, "compiled": compiled}
    return {"ratio": {k: v for k, v in ratio.items() if v}, "failed": failed or {}}


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Call the check with other parts, and an environment that needs no setting up."""
    from tests.gpu_check import check as gpu_check

    def call(parts, *options, setup="pass", probe="pass"):
        monkeypatch.setattr(gpu_check, "parts", lambda *_: parts)
        monkeypatch.setattr(gpu_check, "setup_part", lambda *_: part("setup", setup))
        monkeypatch.setattr(gpu_check, "python_of", lambda _: Path(sys.executable))
        monkeypatch.setattr(gpu_check, "PROBE", probe)
        monkeypatch.setattr(gpu_check, "settings", lambda *_: {})  # they would outlive the test
        monkeypatch.setattr("signal.signal", lambda *_: None)
        status = gpu_check.main(["--out", str(tmp_path / "out"), *options])
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


def test_few_files_are_brought_home_whatever_happens(stand_ins, tmp_path):
    out, home = tmp_path / "out", tmp_path / "home"
    table = f"open({str(out / 'gpu_kernels.txt')!r}, 'w').write('a table')"
    interrupted = f"import os, signal; {table}; os.kill(os.getppid(), signal.SIGINT)"
    parts = [
        part("tests", writes(out / "tests.json", {"a.py": FILE})),
        part("kernels", interrupted, alone=True),
    ]
    with pytest.raises(KeyboardInterrupt):
        stand_ins(parts, "--copy", str(home))
    files = sorted(path.name for path in home.iterdir())
    assert files == ["gpu_kernels.txt", "numbers_and_logs.tar.gz", "report.md"]
    assert "| **PASS** |" in (home / "report.md").read_text()
    with tarfile.open(home / "numbers_and_logs.tar.gz") as archive:
        assert {"tests.json", "logs/tests.log", "logs/setup.log"} <= set(archive.getnames())


@each(
    ("failing", "reason"),
    [
        ("setup", "the environment could not be set up (status 1)"),
        ("probe", "Unavailable: no driver"),
    ],
)
def test_without_an_environment_or_a_gpu_no_tests_are_started(stand_ins, failing, reason):
    parts = [part("first", "print('looked')"), part("tests")]
    code = "raise SystemExit('Unavailable: no driver')"
    status, report = stand_ins(parts, **{failing: code})
    assert status == 1
    assert ("looked" in report) == (failing == "probe")  # into what is wrong with the GPU
    assert f"not started: {reason}" in report
    assert "no driver" in report


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
