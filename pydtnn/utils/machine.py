"""What distinguishes this machine from others, and how much of it this process may use."""

from __future__ import annotations

import platform
from fractions import Fraction
from pathlib import Path

NUMBERS = ("cpu family", "model", "CPU implementer", "CPU part")
"""What Linux tells of a CPU beside its name, which hypervisors shorten and ARM's lack."""


def cpu_name() -> str:
    """Return the name of the CPU in its maker's words, or at least its architecture."""
    return _cpu().get("model name") or platform.processor() or platform.machine()


def cpu_model() -> str:
    """Return the name of the CPU with the numbers that tell its generation."""
    cpu = _cpu()
    return ", ".join([cpu_name(), *(f"{name} {cpu[name]}" for name in NUMBERS if name in cpu)])


def cpu_quotas(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> dict[str, Fraction]:
    """Return how many cores' worth of time Linux grants this process and others together.

    Containers and batch systems limit the time of a control group of processes, not the cores they
    may run on. A group shares what its parents may use, so there may be several limits.

    Parameters
    ----------
    groups : Path
        Where the system names the groups of this process, versions 1 and 2.
    mounted : Path
        Where it shows them.

    Returns
    -------
    dict
        Cores by group; empty where nothing is limited, or on another system than Linux.
    """
    quotas = {}
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = Path(path.lstrip("/"))
        roots = ("cpu", "cpu,cpuacct", "cpuacct,cpu") if controllers else ("", "unified")
        for folder in (mounted / root / group for root in roots for group in (own, *own.parents)):
            quota, period = _quota(folder)
            if quota > 0 and period > 0:
                quotas[str(folder.resolve())] = Fraction(quota, period)
    return quotas


def _quota(folder: Path) -> tuple[int, int]:
    """CPU time that a control group may use in a period, in us; at most 0 where it has no limit."""
    words = _text(folder / "cpu.max").split() or [  # version 2, else version 1
        *_text(folder / "cpu.cfs_quota_us").split(),
        *_text(folder / "cpu.cfs_period_us").split(),
    ]
    try:
        quota, period = map(int, words)
    except ValueError:  # "max 100000", or no such file
        return 0, 0
    return quota, period


def _text(path: Path) -> str:
    """Contents of a file of the system; nothing where it has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu() -> dict[str, str]:
    """What Linux tells of the first core."""
    text = _text(Path("/proc/cpuinfo"))  # empty on another system
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
