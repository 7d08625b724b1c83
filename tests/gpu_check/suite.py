"""The tests, file by file over several processes; on a GPU, also under compute-sanitizer.

    python -m tests.gpu_check.suite --on-gpu --workers 12 --json tests.json
    python -m tests.gpu_check.suite --tool racecheck --workers 3 --json racecheck.json \
        tests/kernels/cuda -k float32

A process per file, so that a crash, which on a GPU spoils all that follows in the same process, or
a test that waits for ever costs one file. Files with most tests that use a GPU come first. What is
known is written after each file. A sanitizer watches our own kernels only, and every
array is an allocation of its own, so that it sees where arrays end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.processes import end

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 9  # exit status of a sanitizer that has found something
"""What the sources of files have in them whose tests may use a GPU."""

ON_GPU = re.compile(r"test_on_gpu|Gpu|\[(?:[^\]]*-)?cuda[-\]]")
"""What the ids of tests have in them that ran on one if they passed: a class, or a parameter."""

ON_GPU_KEYWORDS = "test_on_gpu or Gpu or cuda"
"""What pytest selects them by."""

APART = ("tests/comm/test_nccl.py", "tests/comm/test_staged.py")
"""Files that parts of their own run, since ranks share the GPU in them."""

TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
"""Where the sanitizer is that is not on the path."""

LIBRARIES = ("cudnn", "cublas", "cutlass", "xmma", "gemm", "nchw", "nhwc")
"""What the names of NVIDIA's kernels have in them, and ours have not."""

_OUTCOME = re.compile(r"^(\S+?::.*) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: |$)", re.MULTILINE)
_BEGUN = re.compile(r"^(\S+?::.*?) *$", re.MULTILINE)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_REFUSED = re.compile(r"^=+ *(?:Error: )?(.*not supported.*)$", re.MULTILINE | re.IGNORECASE)


@dataclass
class Result:
    """What came of one file.

    Attributes
    ----------
    state : str
        "passed", "failed", "empty" (nothing ran, or all was skipped) or "not done".
    passed, failed, skipped, on_gpu : int
        Tests; `on_gpu` of those that passed.
    seconds : float
    told : list of str
        Tests that failed, why tests were skipped, or the end of the output.
    """

    state: str = "not done"
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    on_gpu: int = 0
    seconds: float = 0.0
    told: list[str] = field(default_factory=list)


def read(output: str, status: int | None, tool: str | None = None) -> Result:
    """Judge the output of a verbose pytest; the status is None where it was ended."""
    outcomes = {test: outcome for test, outcome in _OUTCOME.findall(output)}
    counts = Counter(outcomes.values())
    result = Result(
        passed=counts["PASSED"] + counts["XFAIL"],
        failed=counts["FAILED"] + counts["ERROR"] + counts["XPASS"],
        skipped=counts["SKIPPED"],
        on_gpu=sum(o == "PASSED" and bool(ON_GPU.search(t)) for t, o in outcomes.items()),
    )
    bad = ("FAILED", "ERROR", "XPASS")
    result.told = [f"{outcome} {test}" for test, outcome in outcomes.items() if outcome in bad]
    found = sum(map(int, _SUMMARY.findall(output))) if tool else 0
    if found or (tool and status == FOUND):
        result.told.append(f"{tool}: {found} errors or hazards")
    refused = _REFUSED.findall(output) if tool else []
    if status is None:
        begun = _BEGUN.findall(output)
        result.told.append(f"ended in {begun[-1]}" if begun else "ended before its first test")
    elif refused:
        result.told = refused[:1]
    elif status == 5 or (status == 0 and not result.passed):
        result.state = "empty"
        result.told += re.findall(r"^SKIPPED .*$", output, re.MULTILINE)[:3]
    elif status == 0 and not found and (not tool or _SUMMARY.search(output)):
        result.state = "passed"
    else:
        result.state = "failed"
        result.told = result.told or [f"status {status}", *output.splitlines()[-8:]]
    return result


def on_gpu() -> list[str]:
    """Return the files with tests that run on a GPU where there is one, those with most first."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False)
    files = Counter(test.split("::")[0] for test in done.stdout.splitlines() if ON_GPU.search(test))
    if done.returncode:
        print(f"suite: not all tests can be collected:\n{done.stdout[-3000:]}", flush=True)
    return [file for file, _ in files.most_common() if not file.startswith(APART)]


def command(file: str, keywords: str, tool: str | None) -> list[str]:
    """Return what runs the tests of a file."""
    pytest = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "--color=no"]
    pytest += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", file]
    pytest += ["-k", keywords] if keywords else []
    if tool is None:
        return pytest
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), *TOOLKITS))
    sanitizer = shutil.which("compute-sanitizer", path=places) or "compute-sanitizer"
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    for name in LIBRARIES:  # one filter each: the conditions of one filter must all hold
        options += ["--kernel-name-exclude", f"kns={name}"]
    options += ["--report-api-errors", "no"]  # tests provoke them; what counts is what kernels do
    options += ["--require-cuda-init", "no"]  # all tests of a file may be skipped
    options += ["--launch-timeout", "100"]
    return [sanitizer, *options, *pytest, "-p", "tests.gpu_check.plain_memory"]


def run(
    files: Sequence[str],
    keywords: str = "",
    tool: str | None = None,
    *,
    workers: int,
    deadline: float = math.inf,
    limit: float,
    found: Path | None = None,
) -> list[Result]:
    """Test so many files at a time, each in a process; write what is known after each.

    Parameters
    ----------
    files : sequence of str
    keywords : str
        Which tests, as pytest's -k.
    tool : str, optional
        Of compute-sanitizer.
    deadline : float
        When the last file must have been ended, by `time.monotonic`.
    limit : float
        Seconds for one file.
    found : Path, optional
        File of the results.
    """
    results, writing = {file: Result() for file in files}, threading.Lock()

    def one(file: str) -> None:
        start = time.monotonic()
        seconds = min(limit, deadline - start)
        result = Result(told=["no time was left"])
        if seconds >= 1:
            result = test(command(file, keywords, tool), seconds, tool)
            result.seconds = time.monotonic() - start
        with writing:
            results[file] = result
            print(f"{file}: {result.state}, {result.seconds:.0f} s", flush=True)
            write()

    def write() -> None:
        if found:
            beside = found.with_suffix(".part")
            beside.write_text(json.dumps({file: asdict(one) for file, one in results.items()}))
            beside.replace(found)

    write()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, files))
    return [*results.values()]


def test(command: Sequence[str], seconds: float, tool: str | None) -> Result:
    """Run tests in a process that is ended after so many seconds; print what failed."""
    with tempfile.TemporaryFile() as out:
        given: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": out,
            "stderr": subprocess.STDOUT,
        }
        try:
            process = subprocess.Popen(command, cwd=ROOT, **given)
        except OSError as error:
            return Result(told=[str(error)])
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            end(process)
            status = None
        out.seek(0)
        output = out.read().decode(errors="replace")
    result = read(output, status, tool)
    if result.state in ("failed", "not done"):
        print("---", *command, *output.splitlines()[-80:], sep="\n", flush=True)
    return result


def summary(results: Iterable[Result]) -> str:
    """Say in one line what came of all files."""
    results = list(results)
    states = Counter(result.state for result in results)
    passed, on_gpu, failed, skipped = (
        sum(getattr(result, name) for result in results)
        for name in ("passed", "on_gpu", "failed", "skipped")
    )
    files = ", ".join(f"{number} {state}" for state, number in states.items())
    return (
        f"{passed} tests passed ({on_gpu} of them on the GPU), "
        f"{failed} failed, {skipped} skipped; files: {files}"
    )


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("paths", nargs="*", help="files, or tests with ::")
    parser.add_argument("-k", dest="keywords", default="", help="which tests, as pytest's -k")
    parser.add_argument("--on-gpu", action="store_true", help="only tests that use a GPU")
    parser.add_argument("--tool", choices=TOOLS, help="watch with compute-sanitizer")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=180, help="s for one file")
    budget = float(os.environ.get("GPU_CHECK_SECONDS", "inf"))
    parser.add_argument("--seconds", type=float, default=budget, help="s for everything")
    parser.add_argument("--json", type=Path, help="file that receives the results")
    return parser


def main() -> int:
    """Run the tests; the exit status is 0 if nothing failed and nothing is left to do."""
    args = arguments().parse_args()
    results = run(
        on_gpu() if args.on_gpu else args.paths,
        ON_GPU_KEYWORDS if args.on_gpu else args.keywords,
        args.tool,
        workers=args.workers,
        deadline=time.monotonic() + args.seconds - 8,  # left to end what runs, and to write
        limit=args.limit,
        found=args.json,
    )
    print(summary(results))
    return 0 if all(result.state in ("passed", "empty") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
