#!/bin/bash
#SBATCH --gpus=1
#SBATCH --time=04:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
srun --ntasks=1 /shared/env/bin/python -u /shared/code/train.py || code=$?
# 143: it saved before the time limit
if [ "$code" = 143 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit ${code:-0}
