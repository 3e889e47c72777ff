"""Choose the threads of an operator on the CPU. They belong to a run: another number rounds sums differently.

A first start takes the same number from every launcher: the cores of the node, divided by its processes.
`OMP_NUM_THREADS` and torch.set_num_threads() of the user come first. torchrun sets OMP_NUM_THREADS to 1 if
the user did not, so a 1 under torchrun is not a wish.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bootfile.ground.errors import BadInput
from bootfile.machine.cores import available_cores, physical_cores

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# variables that torchrun and Accelerate set in each of their processes
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"


class Place(NamedTuple):
    """Where a process runs, and what it asks for. Plain types, which processes send to each other.

    host: the name of its node. cores: names of the physical cores that it may use. quota: cores of the
    control group. wish: threads that the user asks for; 0 without a wish. source: where the wish stands.
    """

    host: str
    cores: list[str]
    quota: int
    wish: int
    source: str


def find_place(env: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this process. Call it before torch.set_num_threads(): it asks for the number."""
    cores = physical_cores()
    wish, source = _find_wish(env, len(cores))
    return Place(socket.gethostname(), cores, available_cores(), wish, source)


def choose(places: Sequence[Any]) -> int:
    """Return the number of threads of each process in a first start, the same for all: the least of what
    their nodes allow or the user asks for. places: the Place of each rank, as a list."""
    numbers = []
    of_ranks = [Place(*values) for values in places]
    for place in of_ranks:
        if place.wish:
            numbers.append(place.wish)
            continue
        neighbours = [other for other in of_ranks if other.host == place.host]
        # A launcher may have bound each process to its own cores: together they are those of the node.
        cores = {core for neighbour in neighbours for core in neighbour.cores}
        quotas = sum(neighbour.quota for neighbour in neighbours)
        is_bound = len(cores) > len(place.cores)
        usable = min(len(cores), quotas if is_bound else place.quota)
        # equal shares of the node, and not more than the cores that the process may use
        share = max(1, usable // len(neighbours))
        numbers.append(min(share, len(place.cores)))
    return min(numbers)


def share(processes: int) -> int:
    """Return the threads of each of several processes that this one will start on its node."""
    return max(1, min(len(physical_cores()), available_cores()) // processes)


def check_room(number: int) -> None:
    """Raise BadInput if a limit of processes and threads leaves no room for this number of torch's threads:
    OpenMP would end the process when it starts them. Each rank calls it before its first step."""
    from bootfile.machine import process_limits  # when a run begins, not with `import bootfile`

    if number > 1 and (line := process_limits.shortage(number - 1, f"{number} threads of torch")):
        raise BadInput(f"{line}, or use --threads N, OMP_NUM_THREADS=N")


def _count_in(env: Mapping[str, str], name: str) -> int:
    """Return the number in a variable; 0 if it is not set or is not a number. Of a list, which has a number
    for each level of nested parallel regions, the first one counts."""
    word = env.get(name, "").partition(",")[0].strip()
    return int(word) if word.isascii() and word.isdigit() else 0


def _is_set_by_launcher(env: Mapping[str, str]) -> bool:
    """Return whether a launcher may have set OMP_NUM_THREADS to 1. torchrun does so for several processes."""
    return (_TORCHRUN in env and _count_in(env, "LOCAL_WORLD_SIZE") > 1) or _ACCELERATE in env


def _find_wish(env: Mapping[str, str], cores: int) -> tuple[int, str]:
    """Return (threads that the user asks for, where); (0, "") without a wish."""
    # the number in use against the variable: another one shows a call of torch.set_num_threads() before
    in_use = torch.get_num_threads()
    for name in VARIABLES:
        number = _count_in(env, name)
        if not number:
            continue
        if in_use not in (number, min(number, cores)):  # MKL takes at most one for each physical core
            return in_use, f"torch.set_num_threads({in_use})"
        if name == VARIABLES[0] and number == 1 and _is_set_by_launcher(env):
            return 0, ""
        return number, f"{name}={number}"
    # torch takes one thread for each physical core
    return (in_use, f"torch.set_num_threads({in_use})") if in_use != cores else (0, "")
