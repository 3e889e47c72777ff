"""What a job asks of its platform. Each question has one answer on a node without the signs of a platform
(signs.py); with one, the tables of the platforms answer.

The tables are loaded when the first question meets a sign, or when an argument says where the job runs:
before the job reads data. This module imports no torch.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from common.platform import signs
from common.platform.topology import Topology, is_distributed

_GRACE = 25.0  # seconds: Platform.grace of the table


def _load_tables(env: Mapping[str, str]) -> Any:
    """Return platforms.py if there is a sign of a platform; None without one."""
    if not signs.are_set(env):
        return None
    from common.platform import platforms

    return platforms


def resolve(args: argparse.Namespace, env: Mapping[str, str], gpus: int = 0) -> Topology:
    """Return the layout of the job by layout.resolve(), which has the arguments and the order of the sources.
    Without a sign, and without arguments that say where the job runs, it is one node. Raises BadInput."""
    options = vars(args)
    given = [options.get(name) for name in ("init_method", "rank", "world_size")]
    if signs.are_set(env) or given != [None, None, None]:
        from common.platform import layout

        return layout.resolve(args, env, gpus)
    processes = 1
    if is_distributed(args):
        processes = (gpus if args.processes_per_node is None else args.processes_per_node) or 1
    return Topology(0, 1, processes, None, None, None, "node", "plain")


def promised_gpus(env: Mapping[str, str]) -> int | None:
    """Return the number of GPUs of this node in the platform's variables; None if it is not set or 0."""
    tables = _load_tables(env)
    return tables.promised_gpus(env) if tables else None


def recognised(env: Mapping[str, str]) -> bool:
    """Return whether a platform set these variables. RANK and WORLD_SIZE alone do not count."""
    tables = _load_tables(env)
    return tables is not None and tables.recognised(env)


def default_grace(env: Mapping[str, str]) -> float:
    """Return the default of --grace on the platform that set these variables."""
    tables = _load_tables(env)
    return tables.default_grace(env) if tables else _GRACE


def is_first_on_node() -> bool:
    """Return whether this is the first process of its node that the platform started."""
    return has_local_rank_0() and signs.STARTED_BY not in os.environ


def has_local_rank_0() -> bool:
    """Return whether this process prints for its node."""
    tables = _load_tables(os.environ)
    return tables is None or tables.has_local_rank_0(os.environ)


def count_restarts(env: Mapping[str, str]) -> int:
    """Return how often Slurm, torchrun or ModelArts has restarted this job."""
    tables = _load_tables(env)
    return tables.count_restarts(env) if tables else 0


def describe_starts(env: Mapping[str, str]) -> str:
    """Return the counters of starts that the platform has set, as NAME=VALUE; "" without one."""
    tables = _load_tables(env)
    return tables.describe_starts(env) if tables else ""
