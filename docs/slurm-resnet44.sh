#!/bin/bash
# How training of ResNet-44 on CIFAR-10 scales over a cluster, ours beside PyTorch's: sbatch docs/slurm-resnet44.sh
#
# Twelve ranks, four to a node; published for DistributedDataParallel: 10.11 times on 12 GPUs. Before, `make setup` where
# login node and nodes see it, or an environment of your own in VENV (with PyTorch, or without for ours alone). Options
# after the script's name go to benchmarks/comm/scaling.py and win over those below.
#
# To train instead of measuring, let the last command be
#     srun --mpi="$PMI" python -m pydtnn.train --model resnet44 --dataset cifar10 --global-batch-size 768

#SBATCH --job-name=resnet44
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"

PMI=${PMI:-pmi2}  # of MPICH (the extra `mpi`); Open MPI wants pmix
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # where PyTorch's ranks meet
export MASTER_ADDR

python -m benchmarks.comm.scaling \
    --model resnet44 --ranks 1 2 4 8 12 --runs 5 \
    --threads "$SLURM_CPUS_PER_TASK" --ranks-per-node "$SLURM_NTASKS_PER_NODE" \
    --launcher "srun --mpi=$PMI --nodes={nodes} --ntasks={ranks} --cpus-per-task=$SLURM_CPUS_PER_TASK" \
    --output "resnet44-$SLURM_JOB_ID.txt" --picture "resnet44-$SLURM_JOB_ID.png" "$@"
