"""What must work before anything else can: from a kernel of CuPy's to whole steps as one graph.

    python benchmarks/gpu_check.py --out gpu-check --wheels wheels --only first    # sets pydtnn up
    python benchmarks/gpu_first.py                                      # where it is installed
    python benchmarks/gpu_first.py convolutions steps                   # some of the checks

The first thing to start on a GPU that nobody has tried: it takes about a minute and says more than
the failures of a thousand tests. Each check is a process of its own with a limit, since what goes
wrong on a GPU spoils all that follows in its process; those that measure time come last, alone.
A line of each says whether it went well, what it saw, and the seconds; below are the last words of
those that did not. At the end come all lines once more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu_check.first_checks import ALONE, CHECKS, Given

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 90.0
"""Seconds for a check."""

LAST_WORDS = 40
"""Lines of what a check that failed has said."""


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--model", default="resnet20", help="that is trained")
    parser.add_argument("--size", type=int, default=32, help="of its batch")
    parser.add_argument("--work", default="resnet44-128", help="that is timed")
    parser.add_argument("--limit", type=float, default=LIMIT, help="s for each check")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser


def carry_out(name: str, given: Given) -> bool:
    """Make a check in this process: print its lines, and return whether it went well."""
    try:
        for line in CHECKS[name](given):
            print(line, flush=True)
    except Exception as error:  # of whatever kind: this is what one wants to know
        traceback.print_exc()
        print(f"FAILED: {type(error).__name__}: {' '.join(str(error).split())}"[:400], flush=True)
        return False
    return True


def apart(name: str, options: Sequence[str], limit: float) -> tuple[bool, list[str]]:
    """Make a check in a process of its own and print what came of it.

    Returns
    -------
    tuple of (bool, list of str)
        Whether it went well, and its lines.
    """
    start = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu_check.first", name, "--here", *options]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        said, words = process.communicate(timeout=limit)
        state = "" if process.returncode in (0, 1) else f"FAILED: status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        said, words = process.communicate()
        state = f"FAILED: no end in {limit:.0f} s"
    seconds, good = time.monotonic() - start, process.returncode == 0
    lines = [*said.splitlines(), *([state] if state else [])]
    lines = [f"{name:13} {seconds:4.0f} s  {line}" for line in lines]
    last = [] if good else [f"    | {line}" for line in words.splitlines()[-LAST_WORDS:]]
    print(*lines, *last, sep="\n", flush=True)
    return good, lines


def main(given: Sequence[str] | None = None) -> int:
    """Make the checks; the exit status is 0 if all went well."""
    parser = arguments()
    args = parser.parse_args(given)
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    chosen = [name for name in CHECKS if name in (args.checks or CHECKS)]
    os.environ.setdefault("PYDTNN_TUNING", "fixed")  # to see whether it runs, not how fast
    if args.here:
        what = Given(args.model, args.size, args.work)
        return 0 if all([carry_out(name, what) for name in chosen]) else 1
    options = ["--model", args.model, "--size", str(args.size), "--work", args.work]
    together = [name for name in chosen if name not in ALONE]
    with ThreadPoolExecutor(max(len(together), 1)) as pool:
        seen = list(pool.map(lambda name: apart(name, options, args.limit), together))
    seen += [apart(name, options, args.limit) for name in chosen if name in ALONE]
    if all(good for good, _ in seen):
        return 0
    print("", *(line for _, lines in seen for line in lines), sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
