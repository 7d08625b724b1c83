"""Every promise for one GPU, checked in one call of under ten minutes; a report says what came out.

    python benchmarks/gpu_check.py --out FOLDER --data FOLDER_OF_CIFAR10
    python benchmarks/gpu_check.py --out FOLDER --only tests kernels

Parts run as processes of their own. What only has to be right runs side by side at first, and with
it PyTorch compiles what it is timed with later on; what is timed then has the GPU to itself. A part
that exceeds its time is ended and counts as failed, whatever it has found out. The report is
written anew after each part, so that a call which is cut short leaves one, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import describe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
TAIL = 40  # lines of each part's output in the report

Verdict = tuple[bool, str]
"""Whether a promise is kept, and the figure."""


@dataclass
class Part:
    """One check.

    Attributes
    ----------
    promise : str
        What must be seen.
    command : tuple of str
    limit : float
        Seconds.
    judge : callable
        Makes a verdict of the part when it has ended with status 0.
    alone : bool
        Whether the GPU must be left to it.
    """

    promise: str
    command: tuple[str, ...]
    limit: float
    judge: Callable[[Part], Verdict] = field(default=lambda part: (True, "passed"))
    alone: bool = False
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()
    began: float = 0.0
    seconds: float = 0.0
    verdict: Verdict | None = None

    def start(self, folder: Path, name: str, remaining: float) -> None:
        """Start the process; what it prints goes to a file."""
        self.log = folder / f"{name}.log"
        self.limit = min(self.limit, remaining)
        self.began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def poll(self) -> bool:
        """Whether the part has ended, or has been ended."""
        assert self.process is not None
        self.seconds = time.monotonic() - self.began
        if self.process.poll() is None and self.seconds < self.limit:
            return False
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # the session that `start` made
            self.process.wait()
            self.verdict = False, f"not done after {self.limit:.0f} s"
        elif self.process.returncode:
            self.verdict = False, f"status {self.process.returncode}: {self.last_line()}"
        else:
            try:
                self.verdict = self.judge(self)
            except (OSError, ValueError, KeyError) as error:
                self.verdict = False, f"no result: {error!r}"
        return True

    def lines(self) -> list[str]:
        """Return what the process has printed."""
        return self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []

    def last_line(self) -> str:
        """Return the last thing that it has printed."""
        return next((line for line in reversed(self.lines()) if line.strip()), "")


def tests_passed(part: Part) -> Verdict:
    """Some tests have run: a summary without any passed means that all were skipped."""
    summary = part.last_line()
    return " passed" in summary, summary


def clean(part: Part) -> Verdict:
    """The sanitizer has found nothing."""
    found = [line for line in part.lines() if "ERROR SUMMARY" in line]
    return bool(found) and all("0 errors" in line for line in found), "; ".join(found)


def at_least(path: Path, **bounds: float) -> Callable[[Part], Verdict]:
    """Ratios of a file of numbers, by the last word of their names."""

    def judge(part: Part) -> Verdict:
        ratios = json.loads(path.read_text())
        named = {name.split()[-1]: value for name, value in ratios.items()}
        good = all(named[name] >= bound for name, bound in bounds.items())
        return good, ", ".join(f"{named[name]:.2f} times {name}" for name in bounds)

    return judge


def fast_enough(path: Path, bound: float) -> Callable[[Part], Verdict]:
    """All fractions of the copy bandwidth on the large tensors."""

    def judge(part: Part) -> Verdict:
        fractions: dict[str, float] = json.loads(path.read_text())["cold"]
        slow = sorted((v, k) for k, v in fractions.items() if v < bound)
        worst = ", ".join(f"{name} {value:.2f}" for value, name in slow[:8])
        return (
            not slow,
            f"{len(fractions) - len(slow)} of {len(fractions)}; below: {worst or 'none'}",
        )

    return judge


def as_accurate(path: Path, points: float) -> Callable[[Part], Verdict]:
    """Accuracy within so many points of the eager peer's or above, in less time."""

    def judge(part: Part) -> Verdict:
        results: dict[str, Any] = json.loads(path.read_text())
        (ours, mine, _), (theirs, other, _) = results["ours"], results["eager"]
        good = ours >= theirs - points / 100 and mine < other
        return good, f"{ours:.2%} in {mine:.0f} s, PyTorch {theirs:.2%} in {other:.0f} s"

    return judge


def parts(out: Path, data: str | None, epochs: int) -> dict[str, Part]:
    """All checks, in the order of the report."""
    steps = (sys.executable, str(HERE / "gpu_step_time.py"), "--turns", "5")
    serve = f"printf '30\\n0\\n' | {sys.executable} {HERE / 'gpu_step_time.py'} --serve compiled"
    kernels = ("norm", "fused", "pool", "elementwise", "loss", "update", "random")
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    return {
        "tests": Part(
            "the whole test suite with the cuda backend passes",
            (*PYTEST, "-n", "6", "tests", "-k", "cuda"),
            200,
            tests_passed,
        ),
        "nccl": Part(
            "NCCL with one rank: the communicator's test class passes",
            (*PYTEST, "tests/comm/test_nccl.py", "-k", "OneGpu"),
            100,
            tests_passed,
        ),
        "ranks": Part(
            "two ranks on one GPU, by NCCL from 2.30 on, and by pinned memory: the same",
            (
                *("env", "NCCL_MULTI_RANK_GPU_ENABLE=1", *PYTEST),
                *(
                    "tests/comm/test_nccl.py",
                    "tests/comm/test_staged.py",
                    "-k",
                    "Gpu and not OneGpu",
                ),
            ),
            150,
            tests_passed,
        ),
        "sanitizer": Part(
            "compute-sanitizer finds nothing in the kernel tests",
            (
                *(sanitizer, "--tool", "memcheck", "--error-exitcode", "9"),
                *(*PYTEST, "tests/kernels", "-k", "cuda and not large"),
            ),
            200,
            clean,
        ),
        "compile44": Part(
            "PyTorch compiles ResNet-44 beforehand",
            ("sh", "-c", f"{serve} resnet44 float32"),
            200,
        ),
        "compile50": Part(
            "PyTorch compiles ResNet-50 beforehand",
            ("sh", "-c", f"{serve} resnet50 bfloat16"),
            200,
        ),
        "resnet44": Part(
            "ResNet-44, batch 128: at least 2.5 times eager, 1.1 times compiled",
            (*steps, "--models", "resnet44", "--json", str(out / "resnet44.json")),
            120,
            at_least(out / "resnet44.json", eager=2.5, compiled=1.1),
            alone=True,
        ),
        "resnet50": Part(
            "ResNet-50, batch 128, bfloat16: at least 1.0 times eager, 0.9 times compiled",
            (
                *(*steps, "--models", "resnet50", "--dtypes", "bfloat16"),
                *("--json", str(out / "resnet50.json")),
            ),
            120,
            at_least(out / "resnet50.json", eager=1.0, compiled=0.9),
            alone=True,
        ),
        "kernels": Part(
            "memory-bound kernels: at least 85 % of the copy bandwidth at 256 MB",
            (
                *(sys.executable, str(HERE / "gpu_kernels.py"), "--sizes", "cold"),
                *("--families", *kernels, "--json", str(out / "kernels.json")),
            ),
            60,
            fast_enough(out / "kernels.json", 0.85),
            alone=True,
        ),
        "cifar": Part(
            "ResNet-44 on CIFAR-10: within 0.3 points of PyTorch's or above, in less time",
            (
                *(sys.executable, str(HERE / "gpu_cifar.py"), "--epochs", str(epochs)),
                *("--data", data or "", "--json", str(out / "cifar.json")),
            ),
            200,
            as_accurate(out / "cifar.json", 0.3),
            alone=True,
        ),
    }


def run(chosen: dict[str, Part], folder: Path, deadline: float, told: Callable[[], None]) -> None:
    """Run parts side by side, and those that must be alone one after the other."""
    together = {name: part for name, part in chosen.items() if not part.alone}
    groups = [together, *({name: part} for name, part in chosen.items() if part.alone)]
    for group in groups:
        for name, part in group.items():
            remaining = deadline - time.monotonic()
            if remaining < 5:
                part.verdict = False, "no time was left"
            else:
                part.start(folder, name, remaining)
        running = [part for part in group.values() if part.verdict is None]
        while running:
            time.sleep(0.2)
            running = [part for part in running if not part.poll()]
        told()


def gpu() -> str:
    """Name the GPU and its driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no GPU ({error})"


def write_report(path: Path, chosen: dict[str, Part], head: Sequence[str]) -> None:
    """Write the table, then the end of what each part has printed."""
    lines = [*head, "", "| check | must be seen | seen | s | |", "| --- | --- | --- | --- | --- |"]
    for name, part in chosen.items():
        good, figure = part.verdict or (False, "has not run")
        figure = figure.replace("|", "/")
        sign = "yes" if good else "**no**"
        lines.append(f"| {name} | {part.promise} | {figure} | {part.seconds:.0f} | {sign} |")
    for name, part in chosen.items():
        lines += ["", f"## {name}", "", "```", *part.lines()[-TAIL:], "```"]
    path.write_text("\n".join(lines) + "\n")


def build() -> str:
    """Build the extensions where they are missing; return what went wrong."""
    if any((ROOT / "pydtnn/kernels/cpu").glob("*.so")):
        return ""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--parallel", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr[-2000:] if done.returncode else ""


def main() -> int:
    """Run the checks; the exit status is 0 if all promises are kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report and the logs")
    parser.add_argument("--data", help="folder of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=12, help="of CIFAR-10")
    parser.add_argument("--budget", type=float, default=570, help="s for everything")
    parser.add_argument("--only", nargs="+", help="names of parts")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    everything = parts(args.out.resolve(), args.data, args.epochs)
    chosen = {name: everything[name] for name in args.only or everything}
    head = [f"# Checks on {gpu()}", "", *describe()]
    if problem := build():
        head += ["", "The extensions could not be built:", "", "```", problem, "```"]

    def told() -> None:
        write_report(args.out / "report.md", chosen, head)

    told()
    run(chosen, args.out, deadline, told)
    print((args.out / "report.md").read_text())
    return 0 if all(part.verdict and part.verdict[0] for part in chosen.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
