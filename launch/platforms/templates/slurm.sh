#!/bin/bash
#SBATCH --job-name=$run
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$processes
?#SBATCH --gpus-per-node=$gpus
?#SBATCH --cpus-per-task=$cpus_per_task
?#SBATCH --partition=$partition
?#SBATCH --account=$account
?#SBATCH --time=$hours:00:00
#SBATCH --output=$log_dir/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --$requeue

set -e
export $variables
?export SRUN_CPUS_PER_TASK=$cpus_per_task  # srun does not inherit the number
# srun starts one process per GPU, which reads its rank from the variables of the step.
srun --kill-on-bad-exit=1 --distribution=block $python $code_dir/$job $arguments
