"""Whether an MPI launcher started this process, told from the environment, without mpi4py."""

from __future__ import annotations

import os

_RANK_VARIABLES = (
    "PMI_RANK",  # MPICH (hydra), Intel MPI, srun --mpi=pmi2, Cray
    "PMIX_RANK",  # Open MPI, srun --mpi=pmix
    "OMPI_COMM_WORLD_RANK",  # Open MPI
    "MV2_COMM_WORLD_RANK",  # MVAPICH
    "MPI_LOCALRANKID",  # hydra
)
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
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
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1:
        raise ValueError(
            f"srun started {tasks} tasks without MPI, so each would train alone; "
            "use `srun --mpi=pmix` (or pmi2), or mpirun inside the allocation."
        )
    return False


def launched_ranks() -> int | None:
    """Return how many processes the launcher says it started, or None where it does not say."""
    for name in _SIZE_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    return None
