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

set -eo pipefail
{% for name, value in environment.items() %}
export {{ name }}={{ value }}
{% endfor %}
{% if cpus_per_task is defined %}
export SRUN_CPUS_PER_TASK={{ cpus_per_task }}  # srun does not inherit the number
{% endif %}
# srun starts one process per GPU, which reads its rank from the variables of the step. Each task of an array has its own folder.
start() {
srun --kill-on-bad-exit=1 --distribution=block {{ python | default("python") }} {{ code_dir }}/{{ job }} {{ arguments }}{% for name, url in outputs.items() %} --{{ name }}={{ url }}"${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}"{% endfor %}

}
# srun stops all processes with SIGTERM when one fails, and returns the largest code. `failed`: its lines on those that failed.
code=0
exec 3>&1
failed=$(start 2>&1 >&3 | sed -un 'w /dev/stderr
  /^srun: error: .*: tasks\? [0-9,-]*: /{/ code 1\(43\|38\|52\)$/d;/: Terminated$/d;p}') || code=$?
{% if restarts %}
# 143, after SIGUSR1 138, after SIGXCPU 152: a signal stopped the job, and all processes saved. It continues in a new allocation.
if [[ $code = 143 || $code = 138 || $code = 152 ]] && [ -z "$failed" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt {{ restarts }} ]; then
  # The id of an array's last task is also that of the array.
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
{% endif %}
exit $code
