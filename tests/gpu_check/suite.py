"""The tests, file by file over several processes; on a GPU, also under compute-sanitizer.

    python -m tests.gpu_check.suite --workers 12 --json tests.json
    python -m tests.gpu_check.suite --tool racecheck --workers 3 --json racecheck.json \
        tests/kernels/cuda -k float32

A process per file, so that a crash, which on a GPU spoils all that follows in the same process, or
a test that waits for ever costs one file. Files that use the GPU come first, among them the large
ones. What is known is written after each file. A sanitizer watches our own kernels only, and every
array is an allocation of its own, so that it sees where arrays end.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.common.processes import end

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 9  # exit status of a sanitizer that has found something
USES_GPU = re.compile(r"\bcuda\b|\bgpu\b|nccl", re.IGNORECASE)
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


def test_files(paths: Sequence[str]) -> list[str]:
    """Return the files below the paths, those that use a GPU first, then large before small.

    What names tests inside of a file, with "::", stays as it is.
    """
    whole = [ROOT / path for path in paths if "::" not in path]
    found = {
        file for path in whole for file in (path.rglob("test_*.py") if path.is_dir() else [path])
    }
    texts = {path: path.read_text(encoding="utf-8") for path in found}

    def order(path: Path) -> tuple[bool, int, str]:
        return not USES_GPU.search(texts[path]), -len(texts[path]), str(path)

    files = [str(path.relative_to(ROOT)) for path in sorted(found, key=order)]
    return [*(path for path in paths if "::" in path), *files]


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


class Suite:
    """Files that are tested side by side.

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
    json : Path, optional
        File of the results, written anew after each.
    """

    def __init__(
        self,
        files: Sequence[str],
        keywords: str = "",
        tool: str | None = None,
        *,
        deadline: float,
        limit: float,
        json: Path | None = None,
    ) -> None:
        self.keywords, self.tool = keywords, tool
        self.deadline, self.limit, self.json = deadline, limit, json
        self.results = {file: Result() for file in files}
        self._writing = threading.Lock()

    def run(self, workers: int) -> None:
        """Test all files with so many at a time."""
        self.write()
        with ThreadPoolExecutor(workers) as pool:
            for file, result in zip(self.results, pool.map(self.one, self.results), strict=True):
                print(f"{file}: {result.state}, {result.seconds:.0f} s", flush=True)

    def one(self, file: str) -> Result:
        """Test a file in a process of its own."""
        start = time.monotonic()
        limit = min(self.limit, self.deadline - start)
        if limit < 1:
            self.results[file] = Result(told=["no time was left"])
            return self.results[file]
        with tempfile.TemporaryFile() as out:
            try:
                process = subprocess.Popen(
                    command(file, self.keywords, self.tool),
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                result = Result(told=[str(error)])
            else:
                try:
                    status: int | None = process.wait(limit)
                except subprocess.TimeoutExpired:
                    end(process)
                    status = None
                out.seek(0)
                output = out.read().decode(errors="replace")
                result = read(output, status, self.tool)
                if result.state in ("failed", "not done"):
                    print(f"--- {file}", *output.splitlines()[-80:], sep="\n", flush=True)
        result.seconds = time.monotonic() - start
        self.results[file] = result
        self.write()
        return result

    def write(self) -> None:
        """Write what is known so far; several threads do, one at a time."""
        if self.json:
            with self._writing:
                text = json.dumps({file: asdict(result) for file, result in self.results.items()})
                beside = self.json.with_suffix(f".{os.getpid()}.part")
                beside.write_text(text + "\n")
                beside.replace(self.json)


def summary(results: Iterable[Result]) -> str:
    """Say in one line what came of all files."""
    results = list(results)
    states = Counter(result.state for result in results)
    tests = {
        name: sum(getattr(result, name) for result in results)
        for name in ("passed", "failed", "skipped", "on_gpu")
    }
    files = ", ".join(f"{number} {state}" for state, number in states.items())
    return (
        f"{tests['passed']} tests passed ({tests['on_gpu']} of them on the GPU), "
        f"{tests['failed']} failed, {tests['skipped']} skipped; files: {files}"
    )


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("paths", nargs="*", default=["tests"])
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
    suite = Suite(
        on_gpu() if args.on_gpu else test_files(args.paths),
        ON_GPU_KEYWORDS if args.on_gpu else args.keywords,
        args.tool,
        deadline=time.monotonic() + args.seconds - 8,  # left to end what runs, and to write
        limit=args.limit,
        json=args.json,
    )
    suite.run(args.workers)
    print(summary(suite.results.values()))
    return 0 if all(result.state in ("passed", "empty") for result in suite.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
