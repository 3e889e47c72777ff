#!/bin/bash
#SBATCH --job-name=train-ddp-20261128-180637-d316e6
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --time=24:00:00
#SBATCH --output=/shared/logs/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120

set -eo pipefail
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=8
export SRUN_CPUS_PER_TASK=8  # srun does not inherit the number
# srun starts one process per GPU, which reads its rank from the variables of the step. Each task of an array has its own folder.
start() {
srun --kill-on-bad-exit=1 --distribution=block /shared/env/bin/python /shared/code/train_ddp-0123456789ab/jobs/train_ddp.py --dataset=cifar10 --epochs=20 --lr=0.1 --enable_gpu=true --data_url=/shared/data/cifar10 --train_url=/shared/runs/train-ddp-20261128-180637-d316e6"${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}"
}
# srun stops all processes with SIGTERM when one fails, and returns the largest code. `failed`: its lines on those that failed.
code=0
exec 3>&1
failed=$(start 2>&1 >&3 | sed -un 'w /dev/stderr
  /^srun: error: .*: tasks\? [0-9,-]*: /{/ code 1\(43\|38\|52\)$/d;/: Terminated$/d;p}') || code=$?
# 143, after SIGUSR1 138, after SIGXCPU 152: a signal stopped the job, and all processes saved. It continues in a new allocation.
if [[ $code = 143 || $code = 138 || $code = 152 ]] && [ -z "$failed" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  # The id of an array's last task is also that of the array.
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit $code
