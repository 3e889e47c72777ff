"""Refuse a job that is one of several processes, if nothing says how they belong together.

Each of them would train alone, and they would write into one folder. A launcher that platforms.py does not
know still shows itself: by a rank with a size, or by a rank above 0.
"""

import contextlib
import json
import re
from collections.abc import Mapping

from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import count_in
from common.platform import platforms

_RANK = re.compile(  # a name of a rank: (beginning of the name of its size)
    r"(\w*?)(?:RANK|RANK_?ID|NODE_RANK|MACHINE_RANK|PE|PROCID|PROCNO|PROCESS_ID|TRAINER_ID|WORKER_ID|NODE_ID"
    r"|NODE_INDEX|V?NODENUM|TASKID|ORDINAL)"
)
_SIZES = (  # other ends of its name
    "SIZE", "WORLD_SIZE", "RANK_SIZE", "NPROCS", "NNODES", "NUM_NODES", "NUM_MACHINES", "NUM_PROCESSES",
    "NUM_WORKER", "WORKER_NUM", "TRAINERS_NUM",
)  # fmt: skip
_LAUNCHERS = re.compile(  # launchers whose rank above 0 is a sign without a size
    r"(OMPI|MV2|MVP|PMIX?|PALS|ALPS|JSM|HOROVOD|MPI|MPIRUN|FLUX_TASK|DMLC|AWS_BATCH|SLURM|CROSS|NODE|PBS|LSF_PM)_"
)


# ranks that a process manager sets for each process; only its library knows their number
_OF_MANAGERS = ("PMIX_RANK", "PMI_RANK")


def refuse(env: Mapping[str, str], claim: platforms.Claim | None) -> None:
    """Raise BadInput if this is one of several processes, and the claim does not describe them. Otherwise
    each of them would train alone, and they would write into one folder."""
    if platforms.is_batch(env) and (claim is None or claim.source == "slurm"):
        _refuse_batch_script(env)
    if claim and claim.nodes * (claim.processes or 1) > 1:  # it says how the processes belong together
        return
    names = _find_signs(env, claim)
    if names:
        shown = platforms.values_of(env, *sorted(names))
        raise BadInput(
            f"{shown}: this is one of several processes, and their number, nodes or "
            "local ranks are not known: use torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT; for a job of its own: env -u NAME ... python"
        )


def _refuse_batch_script(env: Mapping[str, str]) -> None:
    """Raise BadInput for a batch script of Slurm that has several tasks: it runs once, not as each task."""
    tasks = count_in(env, "SLURM_NTASKS")
    if not tasks:
        nodes = count_in(env, "SLURM_NNODES") or 1
        tasks = nodes * (count_in(env, "SLURM_NTASKS_PER_NODE") or 1)
    if tasks > 1:
        said = platforms.values_of(env, "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NNODES", "SLURM_NTASKS")
        raise BadInput(
            f"{said}: a batch script runs once, not as {tasks} tasks: write srun --kill-on-bad-exit=1 "
            "python jobs/... (guides/slurm.md); srun --ntasks=1 starts one process"
        )


def _find_signs(env: Mapping[str, str], claim: platforms.Claim | None) -> set[str]:
    """Return the names of the variables that show that this is one of several processes: a size above 1 of a
    launcher, a rank with such a size, a rank above 0 of a launcher that gives no size, and any rank of a
    process manager if no launcher gives a size (PMIX_RANK=0)."""
    signs = set()
    for row in platforms.MPI.values():
        size_name = row.split()[1]
        if _is_above(env, size_name, 1):
            signs.add(size_name)
    for name in env:
        match = _RANK.fullmatch(name)
        is_known = claim is not None and name.startswith("SLURM_")
        if not match or is_known or not env[name].strip().isdigit():
            continue
        beginning = match[1]
        # a job of one process may have a rank, too, so only a rank with a size above 1 counts
        sizes = {beginning + end for end in _SIZES if _is_above(env, beginning + end, 1)}
        if sizes:
            signs |= {name, *sizes}
        elif _is_above(env, name, 0) and _LAUNCHERS.match(name):
            signs.add(name)
    # a rank of 0 without any size: the others are refused, and this one would train alone
    if claim is None and not signs and not any(row.split()[1] in env for row in platforms.MPI.values()):
        signs.update(name for name in _OF_MANAGERS if env.get(name, "").strip().isdigit())
    if "," in env.get("TPU_WORKER_HOSTNAMES", ""):
        signs.add("TPU_WORKER_HOSTNAMES")
    for name in ("TF_CONFIG", "CLUSTER_SPEC"):
        # JSON: {"cluster": {"worker": [HOST, ...], ...}}; another form does not count
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            cluster = json.loads(env[name])["cluster"]
            if sum(map(len, cluster.values())) > 1:
                signs.add(name)
    return signs


def _is_above(env: Mapping[str, str], name: str, number: int) -> bool:
    """Return whether a variable has a number above this one."""
    return (count_in(env, name) or 0) > number
