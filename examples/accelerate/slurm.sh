#!/bin/bash
# Four machines of eight GPUs under Slurm, requeued until the run is finished:
#
#     sbatch examples/accelerate/slurm.sh recipe.yaml /shared/out/run [--setting value …]
#
# The folder must be on a file system that all machines share. Add `--fsdp` settings, or start `accelerate launch` instead of
# torchrun as docs/scaling.md says, to shard weights.
#SBATCH --job-name=sequencematch
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
recipe=$1 output=$2
shift 2

mkdir -p "$output"
latest() { find "$output" -maxdepth 1 -name 'checkpoint-*' | sort --version-sort | tail -n 1; }

before=$(latest)
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# One torchrun a machine. 230 minutes leave ten of the four hours for the last step and its checkpoint.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:${PORT:-29500}" \
    -m sequencematch.cli train "$recipe" --output-dir "$output" --stop-after-minutes 230 \
    ${before:+--resume} "$@" || true
# Stopped early with new checkpoints: go on in a new job. Without progress, something is wrong.
if [ ! -d "$output/final" ]; then
    [ "$(latest)" != "$before" ] || exit 1
    scontrol requeue "$SLURM_JOB_ID"
fi
