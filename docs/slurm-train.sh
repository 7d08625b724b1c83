#!/bin/bash
# Training that survives preemption and the time limit of a queue: sbatch docs/slurm-train.sh
#
# Slurm sends SIGUSR1 to the ranks 90 s before the job ends, also before a preemption with a grace time. The run then
# saves after its step and ends with status 138 (143 after SIGTERM), and the job is put into the queue again, where it
# continues from its newest checkpoint. Options after the script's name go to pydtnn.train and win over those below.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
PMI=${PMI:-pmi2}  # of MPICH (the extra `mpi`); Open MPI wants pmix

srun --mpi="$PMI" --cpus-per-task="$SLURM_CPUS_PER_TASK" python -m pydtnn.train \
    --model resnet44 --dataset cifar10 --global-batch-size 512 --threads "$SLURM_CPUS_PER_TASK" \
    --output-dir "runs/job-$SLURM_JOB_ID" --resume --checkpoint-every auto --grace 60 "$@"
status=$?
case $status in
    138 | 143 | 75)  # SIGUSR1, SIGTERM, a rank was lost or did not answer
        scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"
