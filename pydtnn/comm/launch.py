"""Whether an MPI launcher started this process, told from the environment, without mpi4py."""

from __future__ import annotations

import os

from pydtnn.utils.launcher import number

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
    tasks = number("SLURM_STEP_NUM_TASKS") or 1
    if tasks > 1:
        raise ValueError(
            f"srun: expected tasks with MPI, got {tasks} independent tasks; "
            "use `srun --mpi=pmix` (or pmi2), or mpirun inside the allocation."
        )
    return False
