"""Environment variables set by the launcher of this process, such as mpirun or srun."""

from __future__ import annotations

import os
import re

_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
_LOCAL_RANK_VARIABLES = (
    "MPI_LOCALRANKID",  # hydra, Intel MPI
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_SURVIVES = "OMPI_MCA_mpi_ft_enable"
_LOCAL_SIZES = (
    "MPI_LOCALNRANKS",  # MPICH (hydra), Intel MPI
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
)
"""Variables with the number of ranks that a launcher started on this host."""


def launched_ranks() -> int | None:
    """Return the number of processes according to the launcher, or None if it is not set."""
    return next(filter(None, map(_number, _SIZE_VARIABLES)), None)


def is_first_on_host() -> bool:
    """Return whether this is the first rank of its host; True if the launcher does not specify it.

    Used for errors that are the same on all ranks of a host and are reported once.
    """
    ranks = (os.environ.get(name, "").strip() for name in _LOCAL_RANK_VARIABLES)
    return next(filter(None, ranks), "0") == "0"


def survives() -> bool:
    """Return whether launcher and MPI let ranks continue if another one fails.

    Open MPI's ``mpirun --with-ft ulfm`` sets the variable.
    """
    return os.environ.get(_SURVIVES, "0").lower() not in ("", "0", "false", "no")


def _number(name: str) -> int | None:
    """Return a positive number from an environment variable; None if it is not set.

    Raises
    ------
    ValueError
        If the variable is not a positive number.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise ValueError(
            f"{name}: expected a positive number, as launchers set it, got {text!r}; unset it."
        )
    return int(text)


def local_ranks() -> int:
    """Return the number of ranks on this host according to the launcher; 1 without a launcher.

    If only the total number of ranks is known, as with srun, returns the total.
    """
    known = next(filter(None, map(_number, _LOCAL_SIZES)), None)
    return known or _local_tasks() or launched_ranks() or 1


def _local_tasks() -> int | None:
    """Return the tasks of this Slurm step on this host: for "4(x2),3" and node 2 (the third), 3."""
    tasks, node = os.environ.get("SLURM_STEP_TASKS_PER_NODE"), os.environ.get("SLURM_NODEID")
    if not tasks or not node:
        return None
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", one.strip()) for one in tasks.split(",")]
    counts = [int(one[1]) for one in matches if one for _ in range(int(one[2] or 1))]
    if None in matches or not node.isdecimal() or int(node) >= len(counts) or 0 in counts:
        return None
    return counts[int(node)]


_RANK_VARIABLES = (
    "PMI_RANK",  # MPICH (hydra), Intel MPI, srun --mpi=pmi2, Cray
    "PMIX_RANK",  # Open MPI, srun --mpi=pmix
    "OMPI_COMM_WORLD_RANK",  # Open MPI
    "MV2_COMM_WORLD_RANK",  # MVAPICH
    "MPI_LOCALRANKID",  # hydra
)


def launched() -> bool:
    """Return whether an MPI launcher started this process.

    Raises
    ------
    ValueError
        Where srun started several tasks without MPI: they would all do the same work alone.
    """
    if any(name in os.environ for name in _RANK_VARIABLES):
        return True
    tasks = _number("SLURM_STEP_NUM_TASKS") or 1
    if tasks > 1:
        raise ValueError(
            f"srun: expected tasks with MPI, got {tasks} independent tasks; "
            "use `srun --mpi=pmix` (or pmi2), or mpirun inside the allocation."
        )
    return False
