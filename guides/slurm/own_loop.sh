start() {
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((61440 + SLURM_JOB_ID % 4096))
export MASTER_ADDR MASTER_PORT
srun --kill-on-bad-exit=1 --distribution=block bash -c '
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
exec /shared/env/bin/python /shared/code/train.py /shared/runs/train'
}
