"""A barrier that may take hours. It uses a store, because --timeout limits every collective.

A node may work for long before all can continue (fetch data, restore a checkpoint), and nodes need different
times. In the store a process reports that it is alive, that it is done, or its error. After an error all
processes end with the same line.
"""

import socket
import time

import torch

from common.distributed import ranks
from common.ground.exits import BAD_INPUT, NO_RENDEZVOUS, BadInput, NoRendezvous
from common.ground.heartbeat import Heartbeat
from common.platform.platforms import has_local_rank_0

_POLL, _LOOK_EVERY, _LONGEST, _LINGER = 0.1, 2.0, 6 * 3600, 3.0  # seconds
_SHOWN = 16  # missing ranks named in an error

_beats: dict[str, float] = {}  # name of a barrier -> when this process sent its last heartbeat


def beat(name: str) -> None:
    """Send a heartbeat, at most one a second, while the other ranks wait at this barrier.

    Raises BadInput if another process has failed at it.
    """
    store = ranks.store()
    if store and time.monotonic() - _beats.get(name, 0.0) > 1:
        _beats[name] = time.monotonic()
        store.add(f"{name}/beats/{ranks.rank()}", 1)
        _raise_error(store, name, ranks.rank(), ranks.world_size())


def wait_for_all(name: str, doing: str, error: BadInput | None = None) -> None:
    """Wait until every rank has arrived, for up to six hours. Log at intervals what it waits for.

    name: the name of the barrier. doing: completes "waiting for 3 of 8 processes ...". error: the reason why
    this process cannot continue. Raises BadInput with the same text on every rank if one has an error or is
    lost, and NoRendezvous after six hours.
    """
    if store := ranks.store():
        timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
        gather(store, name, doing, error, ranks.rank(), ranks.world_size(), _LONGEST, timeout)
    elif error:
        raise error


def gather(
    store: torch.distributed.Store,
    name: str,
    doing: str,
    error: BadInput | None,
    rank: int,
    world_size: int,
    limit: float,
    silence: float | None = None,
) -> None:
    """Do what wait_for_all() does, before a process group exists.

    limit: seconds to wait for all.
    silence: seconds without a heartbeat after which a rank is lost; None: forever.
    """
    if error:
        _report(store, name, error.code, f"{error} (rank {rank} on {socket.gethostname()})")
    else:
        store.add(f"{name}/here/{rank}", 1)
        store.add(f"{name}/here", 1)
    heartbeat, looked = Heartbeat(), 0.0
    beats: dict[int, tuple[int, float]] = {}  # rank -> (number of its heartbeats, time of its last change)
    while (absent := world_size - store.add(f"{name}/here", 0)) > 0:
        _raise_error(store, name, rank, world_size)
        if has_local_rank_0():
            heartbeat.beat(f"waiting for {absent} of {world_size} processes {doing}".rstrip())
        if silence and rank == 0 and heartbeat.seconds - looked > _LOOK_EVERY:
            looked = heartbeat.seconds
            _look_for_lost(store, name, doing, beats, world_size, silence)
        if heartbeat.seconds > limit:
            missing = [each for each in range(world_size) if not store.add(f"{name}/here/{each}", 0)]
            text = f"{absent} of {world_size} processes did not arrive {doing}".rstrip()
            text += f" within {limit:.0f} s: ranks {missing[:_SHOWN]}"
            _report(store, name, NO_RENDEZVOUS, text)
        time.sleep(_POLL)
    _raise_error(store, name, rank, world_size)


def _report(store: torch.distributed.Store, name: str, code: int, text: str) -> None:
    store.compare_set(f"{name}/error", "", f"{code} {text}")
    store.add(f"{name}/failed", 1)


def _raise_error(store: torch.distributed.Store, name: str, rank: int, world_size: int) -> None:
    if not store.add(f"{name}/failed", 0):
        return
    code, _, text = store.get(f"{name}/error").decode().partition(" ")
    told = store.add(f"{name}/told", 1)
    deadline = time.monotonic() + _LINGER
    while rank == 0 and told < world_size and time.monotonic() < deadline:
        time.sleep(_POLL)  # rank 0 leaves last: the store ends with it
        told = store.add(f"{name}/told", 0)
    raise (NoRendezvous if int(code) == NO_RENDEZVOUS else BadInput)(text)


def _look_for_lost(
    store: torch.distributed.Store,
    name: str,
    doing: str,
    beats: dict[int, tuple[int, float]],
    world_size: int,
    silence: float,
) -> None:
    """Report a rank whose heartbeats have stopped: a lost node does not report itself."""
    now = time.monotonic()
    for rank in range(world_size):
        is_here = store.add(f"{name}/here/{rank}", 0)
        count = store.add(f"{name}/beats/{rank}", 0) + is_here
        if rank not in beats or beats[rank][0] != count:
            beats[rank] = count, now
        elif now - beats[rank][1] > silence and not is_here:
            text = f"rank {rank} sent no heartbeat for {silence:.0f} s while the others waited for it {doing}"
            _report(store, name, BAD_INPUT, text)
