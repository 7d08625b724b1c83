"""The check of a GPU, without one: its parts, limits, judgements and report, with stand-ins."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

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

    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                         start_new_session=True)\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n"
    )
    hanging, other = part("hanging", code, limit=5), part("other")
    run([hanging, other], tmp_path)
    assert hanging.state.startswith("ended after")
    assert hanging.tail(1) == ["begun"]
    assert other.state == "done"
    assert not lives(int(child.read_text()))


def test_a_part_that_asks_to_live_on_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.common.processes.GRACE", 0.5)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    stubborn = part("stubborn", code + "time.sleep(600)", limit=1.5)
    run([stubborn], tmp_path)
    assert stubborn.state.startswith("ended after")
    assert stubborn.process.poll() is not None


def test_what_cannot_be_started_says_so(tmp_path):
    from tests.gpu_check.parts import Part

    missing = Part("missing", (str(tmp_path / "nothing"),), 1, 1)
    run([missing], tmp_path)
    assert missing.state.startswith("not started: ")
    assert "nothing" in missing.state


def test_later_parts_are_left_out_when_the_time_is_over(tmp_path):
    parts = [part("first", expected=30, alone=True), part("second", expected=60, alone=True)]
    run(parts, tmp_path, seconds=32)
    assert parts[0].state == "done"
    assert parts[1].state.startswith("not started: it takes about 60 s, ")


def test_side_by_side_parts_leave_their_time_to_those_that_are_alone(tmp_path):
    hanging = part("hanging", "import time; time.sleep(600)", limit=600)
    alone = part("alone", expected=27, alone=True)
    start = time.monotonic()
    run([hanging, alone], tmp_path, seconds=29)
    assert time.monotonic() - start < 29
    assert hanging.state.startswith("ended after")
    assert alone.state == "done"


def test_an_interrupt_ends_what_runs_and_is_told(tmp_path):
    from tests.gpu_check.parts import run as run_parts

    running, told = part("running", "import time; time.sleep(600)"), []

    def interrupted():
        told.append(running.state)
        if len(told) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parts([part("short"), running], tmp_path, time.monotonic() + 60, interrupted)
    assert running.process.poll() is not None
    assert told[-1].startswith("interrupted after")


# -- test files


PASSED = "tests/test_a.py::test_x[cuda-float32] PASSED [ 50%]\ntests/test_a.py::test_y PASSED\n"
SUMMARY = "========= ERROR SUMMARY: {} errors\n"


@pytest.mark.parametrize(
    ("output", "status", "tool", "state", "told"),
    [
        (PASSED, 0, None, "passed", ""),
        (PASSED + "tests/test_a.py::test_z[a b] FAILED [100%]\n", 1, None, "failed", "test_z[a b]"),
        (PASSED + "tests/test_a.py::test_z ERROR\n", 1, None, "failed", "ERROR tests/test_a.py"),
        (PASSED + "Fatal Python error: Segmentation fault", -11, None, "failed", "Segmentation"),
        (PASSED + "tests/test_a.py::test_z ", None, None, "not done", "ended in tests/test_a.py::"),
        ("", None, None, "not done", "before its first test"),
        ("tests/t.py::test_x SKIPPED (no)\nSKIPPED [1] t.py:1: no GPU", 0, None, "empty", "no GPU"),
        ("collected 0 items", 5, None, "empty", ""),
        (PASSED + SUMMARY.format(0), 0, "memcheck", "passed", ""),
        (PASSED + SUMMARY.format(2), 9, "memcheck", "failed", "memcheck: 2 errors"),
        (PASSED, 0, "memcheck", "failed", "status 0"),
        (PASSED + SUMMARY.format(2), 0, None, "passed", ""),  # in the name of a test, perhaps
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


def test_only_files_with_tests_on_a_gpu_are_chosen(monkeypatch):
    from tests.gpu_check import suite

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/layers/test_linear.py"]
        + ["tests/kernels/cuda/test_on_gpu.py", "tests/utils", "tests/comm/test_nccl.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    monkeypatch.setattr("tests.gpu_check.suite.subprocess.run", lambda *a, **k: done)
    assert suite.on_gpu() == ["tests/kernels/cuda/test_on_gpu.py", "tests/layers/test_linear.py"]


def test_files_are_tested_side_by_side_and_what_happened_to_each_is_written(tmp_path):
    from tests.gpu_check.suite import Result, Suite, summary

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
    suite = Suite(files, deadline=time.monotonic() + 200, limit=100, json=found)
    suite.run(workers=4)
    states = {Path(file).stem[5:]: Result(**r) for file, r in json.loads(found.read_text()).items()}
    expected = {"bad": "failed", "crash": "failed", "good": "passed", "skipped": "empty"}
    assert {name: result.state for name, result in states.items()} == expected
    assert "no GPU here" in states["skipped"].told[0]
    told = summary(suite.results.values())
    assert told.startswith("1 tests passed (0 of them on the GPU), 1 failed, 1 skipped; files: ")


def test_files_that_take_too_long_are_ended_and_late_ones_left_out(tmp_path):
    from tests.gpu_check.suite import Suite

    slow = tmp_path / "test_slow.py"
    slow.write_text("def test_it():\n    import time; time.sleep(600)\n")
    suite = Suite([str(slow)], deadline=time.monotonic() + 200, limit=4)
    assert suite.one(str(slow)).state == "not done"
    assert suite.results[str(slow)].told[0].startswith("ended ")
    suite.deadline = time.monotonic()
    assert suite.one(str(slow)).told == ["no time was left"]


def test_files_that_use_a_gpu_come_first_and_named_tests_stay():
    from tests.gpu_check.suite import test_files

    files = test_files(["tests/kernels", "tests/comm/test_nccl.py::TestOneGpu"])
    assert files[0] == "tests/comm/test_nccl.py::TestOneGpu"
    assert "cuda" in files[1]
    assert set(files[1:]) >= {"tests/kernels/test_norm.py", "tests/kernels/cuda/test_on_gpu.py"}


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


def test_a_second_call_adds_to_the_first(stand_ins, tmp_path):
    out = tmp_path / "out"
    first = [part("tests", writes(out / "tests.json", {"a.py": FILE}))]
    assert "| **PASS** |" in stand_ins(first)[1]
    second = [part("nccl", writes(out / "nccl.json", {"a.py": FILE}))]
    assert stand_ins(second, "--only", "nccl")[1].count("| **PASS** |") == 2
    assert (
        stand_ins([part("tests")])[1].count("| **PASS** |") == 1
    )  # its result was of another call


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


def test_without_an_environment_nothing_is_started(stand_ins):
    parts = [part("first"), part("tests")]
    status, report = stand_ins(parts, setup="raise SystemExit('gcc: not found')")
    assert "| first | 0 s |  | not started" in report
    assert status == 1
    assert "gcc: not found" in report
    assert "not started: the environment could not be set up (status 1)" in report


def test_without_a_gpu_one_part_looks_into_it_and_each_of_the_others_tells_the_reason(stand_ins):
    parts = [part("first", "print('no libcuda')"), part("tests")]
    status, report = stand_ins(parts, probe="raise SystemExit('Unavailable: no driver')")
    assert status == 1
    assert "no libcuda" in report
    assert "| tests | 0 s |  | not started: Unavailable: no driver |" in report


def test_the_plan_fits_into_the_budget_and_every_command_is_understood(tmp_path):
    from tests.gpu_check import check as gpu_check

    parts = gpu_check.parts(Path("python"), tmp_path, tmp_path, 570)
    alone = sum(one.expected for one in parts if one.alone)
    together = max(one.expected for one in parts if not one.alone)
    setup = gpu_check.setup_part(tmp_path, None)
    assert setup.expected + together + alone <= 570
    for one in parts:
        dash, module, *options = one.command[1:]
        assert dash == "-m"
        importlib.import_module(module).arguments().parse_args(options)


def test_the_tests_that_are_named_exist(tmp_path):
    from tests.gpu_check import check as gpu_check

    parts = gpu_check.parts(Path("python"), tmp_path, None, 570)
    named = [word for one in parts for word in one.command if word.startswith("tests/")]
    assert any("::" in word for word in named)
    for word in named:
        file, _, name = word.partition("::")
        assert (ROOT / file).exists()
        if name:
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            assert hasattr(module, name)


def test_promises_name_parts_that_there_are(tmp_path):
    from tests.gpu_check import check as gpu_check
    from tests.gpu_check.promises import PROMISES

    names = {one.name for one in gpu_check.parts(Path("python"), tmp_path, None, 570)}
    assert {name for promise in PROMISES for name in promise.parts} <= names


@pytest.mark.parametrize("options", [["--only", "nothing"], []])
def test_mistakes_in_the_command_are_told(options, capsys):
    from tests.gpu_check import check as gpu_check

    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(options)
    assert "no part nothing; there are first, tests, " in (told := capsys.readouterr().err) or (
        "--out is needed" in told
    )


def test_the_plan_can_be_read_without_running_it(capsys):
    from tests.gpu_check import check as gpu_check

    assert gpu_check.main(["--list"]) == 0
    assert "cifar" in capsys.readouterr().out


def test_the_wheels_to_bring_are_named_as_pip_reads_them():
    lines = (ROOT / "tests/gpu_check/wheels.txt").read_text().splitlines()
    names = {line.split()[0] for line in lines if line and not line.startswith("#")}
    assert {"mpich", "mpi4py"} <= names
    assert not {name for name in names if name.startswith(("nvidia", "cupy", "torch"))}


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
