"""The machine and this process: the CPU, its cores and their limits, threads and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from pydtnn.utils.launcher import local_ranks

if TYPE_CHECKING:
    from threadpoolctl import threadpool_limits

CPU_FIELDS = ("cpu family", "model", "CPU implementer", "CPU part")
"""Fields that identify a CPU besides its name: hypervisors shorten names, ARM CPUs have none."""

MAX_THREADS = 1024
"""Maximum threads of a rank: above the cores of any host, below the limits of a process."""

_earlier = [0]
"""Peaks of resident memory before each restart, in B."""


def cpu_name() -> str:
    """Return the vendor's name of the CPU, or its architecture if the name is unknown."""
    return _cpu().get("model name") or platform.processor() or platform.machine()


def cpu_model() -> str:
    """Return the name of the CPU with the numbers that identify its generation."""
    cpu = _cpu()
    return ", ".join([cpu_name(), *(f"{name} {cpu[name]}" for name in CPU_FIELDS if name in cpu)])


def peak_memory() -> int:
    """Return the peak resident memory of this process, in B."""
    return max(_earlier[-1], recent_peak_memory())


def restart_peak() -> None:
    """Return free memory to the system, and let `recent_peak_memory` begin anew, if it is Linux."""
    gc.collect()
    _earlier.append(peak_memory())
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def recent_peak_memory() -> int:
    """Return the peak resident memory since `restart_peak`, or of the whole process, in B."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_memory() -> int:
    """Return the resident memory of this process, in B; 0 on systems other than Linux."""
    words = _text(Path("/proc/self/statm")).split()
    return int(words[1]) * resource.getpagesize() if len(words) > 1 else 0


def free_memory() -> float:
    """Return the memory that processes may still use, in B; infinite if that is unknown.

    That of the host, and of the Linux control groups of this process if they have limits.
    """
    found = [float("inf")]
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(1024.0 * int(line.split()[1]))
    names = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
    for folder in _control_groups("memory", ("memory",), ("",)):
        for limit, used in ((_text(folder / a), _text(folder / b)) for a, b in names.items()):
            if limit.strip().isdecimal() and used.strip().isdecimal():
                found.append(max(float(limit) - float(used), 0.0))
    return min(found)


def _control_groups(
    controller: str,
    first: Sequence[str],
    second: Sequence[str],
    groups: Path = Path("/proc/self/cgroup"),
    mounted: Path = Path("/sys/fs/cgroup"),
) -> Iterator[Path]:
    """Yield the folders of the Linux control groups of this process, and of their parents.

    Parameters
    ----------
    controller : str
    first, second : sequence of str
        Where the controller is mounted, for versions 1 and 2 of control groups.
    groups, mounted : Path
        See `cpu_quotas`.
    """
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        for root in first if controllers else second:
            yield from (mounted / root / one for one in (group, *group.parents))


def cpu_quotas(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> dict[str, Fraction]:
    """Return the limits of CPU time, in cores, of the Linux control groups of this process.

    Containers and batch systems limit the time of a control group of processes, not the cores they
    may run on. The limits of parent groups apply too, so there may be several.

    Parameters
    ----------
    groups : Path
        File with the groups of this process, versions 1 and 2.
    mounted : Path
        Mount point of the control groups.

    Returns
    -------
    dict
        Cores by group; empty without limits, or on systems other than Linux.
    """
    quotas = {}
    first = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
    for folder in _control_groups("cpu", first, ("", "unified"), groups, mounted):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            quotas[str(folder.resolve())] = Fraction(quota, period)
    return quotas


def _quota(folder: Path) -> tuple[int, int]:
    """Return quota and period of a control group, in us; a quota of at most 0 means no limit."""
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
    """Return the content of a system file; empty if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu() -> dict[str, str]:
    """Return the entries of /proc/cpuinfo for the first core."""
    text = _text(Path("/proc/cpuinfo"))  # empty on another system
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def default_threads() -> int:
    """Return OMP_NUM_THREADS if it is set, otherwise this process's share of the cores.

    Computed without communication: the cores that this process may run on, divided by the number
    of ranks on this host according to the MPI launcher (unless this rank is pinned to a subset of
    the cores), and at most its share of the CPU time of its control groups. `pydtnn.comm.cores` is
    exact, also for unequal shares.

    Raises
    ------
    ValueError
        If OMP_NUM_THREADS or a variable of the launcher is not a positive number.
    """
    cores = available_cores()
    pinned = len(cores) < (os.cpu_count() or 1)
    ranks = local_ranks()
    share = Fraction(len(cores), 1 if pinned else ranks)
    share = min([share, *(quota / ranks for quota in cpu_quotas().values())])
    return requested_threads() or max(1, int(share))


def limit_blas_threads(threads: int) -> threadpool_limits:
    """Set the number of threads of every loaded BLAS library, for the whole process.

    For programs (the trainer, the command line), never at import: it affects other code in the
    process.

    Parameters
    ----------
    threads : int
        Number of threads, at least 1.

    Returns
    -------
    threadpool_limits
        Restores the previous numbers at the end of a `with` block or in
        `restore_original_limits()`.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=threads, user_api="blas")


def available_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def requested_threads() -> int | None:
    """Return OMP_NUM_THREADS; of a list such as "4,2", the first number (outermost level)."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    first = text.split(",")[0].strip()
    if not first.isdecimal() or not 1 <= int(first) <= MAX_THREADS:
        raise ValueError(
            f"OMP_NUM_THREADS: expected a number from 1 to {MAX_THREADS}, got {text!r}; unset it "
            "or use 1"
        )
    return int(first)
