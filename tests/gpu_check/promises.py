"""What must be seen on one GPU, and whether it was: one row per promise.

Rows are judged by the numbers that parts have written until then, so that a part which was cut
short still counts with what it has found: what was seen to be wrong is FAIL, and what was not seen
is NOT RUN, never PASS.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu_check.suite import TOOLS, Result, summary

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
BANDWIDTH = 0.85
POINTS = 0.3


class Seen(NamedTuple):
    """PASS, FAIL or NOT RUN, and the figure or the reason."""

    verdict: str
    figure: str


class Promise(NamedTuple):
    """A row: what is promised, the parts whose results decide, and how."""

    name: str
    wanted: str
    parts: tuple[str, ...]
    judge: Callable[[Path], Seen]


def load(folder: Path, name: str) -> dict[str, Any]:
    """Return the numbers that a part has written; none if it has not."""
    try:
        found = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tests(*names: str) -> Callable[[Path], Seen]:
    """Every file passes, in each of the parts named, and some test has used the GPU."""

    def judge(folder: Path) -> Seen:
        files = {
            f"{name} {file}": Result(**result)
            for name in names
            for file, result in load(folder, name).items()
        }
        if not files:
            return Seen(NOT_RUN, "no result")
        states = Counter(result.state for result in files.values())
        figure = summary(files.values())
        failed = [file for file, result in files.items() if result.state == "failed"]
        if failed:
            return Seen(FAIL, f"{figure}; {shortened(failed)}")
        missing = [name for name in names if not load(folder, name)]
        lost = [file for file, result in files.items() if result.state == "not done"]
        if lost or missing:
            return Seen(NOT_RUN, f"in part: {figure}; not done: {shortened(lost + missing)}")
        if not sum(result.on_gpu for result in files.values()):
            reasons = [line for result in files.values() for line in result.told]
            return Seen(NOT_RUN, f"no test has used a GPU; {shortened(reasons)}")
        assert states.keys() <= {"passed", "empty"}
        return Seen(PASS, figure)

    return judge


def either(*judges: Callable[[Path], Seen]) -> Callable[[Path], Seen]:
    """One of several ways is enough, if none of them fails."""

    def judge(folder: Path) -> Seen:
        seen = [one(folder) for one in judges]
        figure = " / ".join(f"{one.verdict}: {one.figure}" for one in seen)
        verdicts = {one.verdict for one in seen}
        return Seen(next(v for v in (FAIL, PASS, NOT_RUN) if v in verdicts), figure)

    return judge


def ratios(rows: Sequence[str], peer: str, bound: float) -> Callable[[Path], Seen]:
    """Ours is so many times as fast as a peer, in all rows."""

    def judge(folder: Path) -> Seen:
        measured = load(folder, "steps")
        found = {row: measured.get(row, {}).get("ratio", {}).get(peer) for row in rows}
        figures = [
            f"{row} {ratio:.2f}" if ratio else f"{row}: {why(measured, row, peer)}"
            for row, ratio in found.items()
        ]
        if any("ours" in measured.get(row, {}).get("failed", {}) for row in rows):
            return Seen(FAIL, "; ".join(figures))
        return bounded(list(found.values()), bound, "; ".join(figures))

    return judge


def why(measured: Mapping[str, Any], row: str, peer: str) -> str:
    """Say why a ratio is missing."""
    failed = measured.get(row, {}).get("failed", {})
    return failed.get("ours") or failed.get(peer) or "not measured"


def bounded(values: Sequence[float | None], bound: float, figure: str) -> Seen:
    """All values are there and none is below the bound."""
    if any(value is not None and not value >= bound for value in values):
        return Seen(FAIL, figure)
    return Seen(NOT_RUN if None in values or not values else PASS, figure)


def bandwidth(folder: Path) -> Seen:
    """No memory-bound kernel of ours is slower than so much of a copy, on 256 MB."""
    found = load(folder, "kernels").get("memory", {})
    fractions = {
        f"{kernel} {dtype}": fraction
        for dtype, table in found.items()
        for kernel, fraction in table.get("cold", {}).items()
    }
    failed = {
        f"{k} {dtype}": w for dtype, t in found.items() for k, w in t.get("failed", {}).items()
    }
    if not fractions and not failed:
        return Seen(NOT_RUN, "no result")
    slow = sorted((value, name) for name, value in fractions.items() if not value >= BANDWIDTH)
    figure = f"{len(fractions) - len(slow)} of {len(fractions) + len(failed)}"
    if slow:
        figure += "; below: " + shortened([f"{name} {value:.2f}" for value, name in slow], 12)
    if failed:
        figure += "; failed: " + shortened([f"{name} ({w})" for name, w in failed.items()], 4)
    if slow or failed:
        return Seen(FAIL, figure)
    return Seen(PASS if all(table.get("complete") for table in found.values()) else NOT_RUN, figure)


def accuracy(folder: Path) -> Seen:
    """Ours is as accurate as PyTorch's within some points, or more, and takes less time."""
    found = load(folder, "cifar")
    sides = found.get("sides", {})
    figures = [
        f"{side} {100 * s['accuracy']:.2f} % in {s['seconds']:.1f} s" for side, s in sides.items()
    ]
    figures += [f"{side}: {reason}" for side, reason in found.get("failed", {}).items()]
    figure = f"{found.get('epochs', 0)} epochs: " + ", ".join(figures) if figures else "no result"
    peers = [side for name, side in sides.items() if name != "ours"]
    if "ours" not in sides or "eager" not in sides:
        broken = found.get("failed", {}).get("ours", "not done").startswith("status")
        return Seen(FAIL if broken else NOT_RUN, figure)
    ours = sides["ours"]
    good = all(
        ours["accuracy"] >= peer["accuracy"] - POINTS / 100 and ours["seconds"] < peer["seconds"]
        for peer in peers
    )
    return Seen(PASS if good else FAIL, figure)


def shortened(names: Sequence[str], most: int = 5) -> str:
    """List the first of some names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


R44 = ("resnet44-128 float32", "resnet44-128 bfloat16")
R50 = ("resnet50-128 bfloat16",)

PROMISES = (
    Promise("test suite, cuda backend", "all tests pass", ("tests",), tests("tests")),
    Promise("compute-sanitizer", "finds nothing", TOOLS, tests(*TOOLS)),
    Promise(
        "ResNet-44, batch 128, to eager", "at least 2.5", ("steps",), ratios(R44, "eager", 2.5)
    ),
    Promise(
        "ResNet-44, batch 128, to compiled",
        "at least 1.1",
        ("steps",),
        ratios(R44, "compiled", 1.1),
    ),
    Promise(
        "ResNet-50, 224, batch 128, bfloat16, to eager",
        "at least 1.0",
        ("steps",),
        ratios(R50, "eager", 1.0),
    ),
    Promise(
        "ResNet-50, 224, batch 128, bfloat16, to compiled",
        "at least 0.9",
        ("steps",),
        ratios(R50, "compiled", 0.9),
    ),
    Promise(
        "memory-bound kernels of our own, 256 MB",
        f"at least {BANDWIDTH:.0%} of a copy",
        ("kernels",),
        bandwidth,
    ),
    Promise(
        "ResNet-44 on CIFAR-10, one recipe",
        f"within {POINTS} points of PyTorch's or above, in less time",
        ("cifar",),
        accuracy,
    ),
    Promise("NCCL, one rank", "the contract's tests pass", ("nccl",), tests("nccl")),
    Promise(
        "two ranks on one GPU, NCCL >= 2.30 or MPI",
        "the contract's tests pass",
        ("nccl2", "staged2"),
        either(tests("nccl2"), tests("staged2")),
    ),
)
