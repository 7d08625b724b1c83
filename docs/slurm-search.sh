#!/bin/bash
# A search over the tasks of a job array: sbatch --array=1-4 docs/slurm-search.sh space.yaml
#
# Every task adds groups of ranks to one study, and may end at any time: its trials start again from their checkpoints
# in another task, or when the same command is submitted again.

#SBATCH --job-name=search
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=02:00:00
#SBATCH --output=%x-%A-%a.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
export PATH="${VENV:-$PWD/.venv}/bin:$PATH" OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
PMI=${PMI:-pmi2}  # of MPICH (the extra `mpi`); Open MPI wants pmix

srun --mpi="$PMI" --cpus-per-task="$SLURM_CPUS_PER_TASK" python -m pydtnn search "$@" --ranks-per-trial 2
