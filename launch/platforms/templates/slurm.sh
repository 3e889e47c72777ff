#!/bin/bash
#SBATCH --job-name={{ run }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node={{ gpus or 1 }}
{% if gpus %}
#SBATCH --gpus-per-node={{ gpus }}
{% endif %}
{% if cpus_per_task is defined %}
#SBATCH --cpus-per-task={{ cpus_per_task }}
{% endif %}
{% if partition is defined %}
#SBATCH --partition={{ partition }}
{% endif %}
{% if account is defined %}
#SBATCH --account={{ account }}
{% endif %}
{% if hours %}
#SBATCH --time={{ hours }}:00:00
{% endif %}
#SBATCH --output={{ log_dir | default(".") }}/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --{{ "requeue" if restarts else "no-requeue" }}
#SBATCH --signal=TERM@{{ signal_seconds | default(120) }}

set -e
{% for name, value in environment.items() %}
export {{ name }}={{ value }}
{% endfor %}
{% if cpus_per_task is defined %}
export SRUN_CPUS_PER_TASK={{ cpus_per_task }}  # srun does not inherit the number
{% endif %}
# srun starts one process per GPU, which reads its rank from the variables of the step.
code=0
srun --kill-on-bad-exit=1 --distribution=block {{ python | default("python") }} {{ code_dir }}/{{ job }} {{ arguments }} || code=$?
{% if restarts %}
# 143: a signal stopped the job before the time limit, and all processes saved. It continues in a new allocation.
if [ $code = 143 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt {{ restarts }} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
{% endif %}
exit $code

