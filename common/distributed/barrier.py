"""A barrier that may take hours. It uses the store of the group, because --timeout limits every collective.

A node may work for long before all can continue (fetch data, restore a checkpoint), and nodes need different
times. In the store a process reports that it is alive, that it is done, or its error. After an error all
processes end with the same line.
"""

import os
import socket
import time

import torch

from common.distributed import ranks
from common.ground.exits import BadInput, NoRendezvous
from common.ground.heartbeat import Heartbeat

_POLL, _LOOK_EVERY, _LONGEST, _LINGER = 0.2, 2.0, 6 * 3600, 3.0  # seconds

_beats: dict[str, float] = {}  # name of a barrier -> when this process sent its last heartbeat


def beat(name: str) -> None:
    """Send a heartbeat, at most one a second, while the other ranks wait at this barrier.

    Raises BadInput if another process has failed at it.
    """
    store = ranks.store()
    if store and time.monotonic() - _beats.get(name, 0.0) > 1:
        _beats[name] = time.monotonic()
        store.add(f"{name}/beats/{ranks.rank()}", 1)
        _raise_error(store, name)


def wait_for_all(name: str, doing: str, error: BadInput | None = None) -> None:
    """Wait until every rank has arrived, for up to six hours. Log at intervals what it waits for.

    name: the name of the barrier. doing: completes "waiting for 3 of 8 processes ...". error: the reason why
    this process cannot continue. Raises BadInput with the same text on every rank if one has an error or is
    lost, and NoRendezvous after six hours.
    """
    store, rank, world_size = ranks.store(), ranks.rank(), ranks.world_size()
    if store is None:
        if error:
            raise error
        return
    if error:
        store.compare_set(f"{name}/error", "", f"{error} (rank {rank} on {socket.gethostname()})")
        store.add(f"{name}/failed", 1)
        _raise_error(store, name)
    store.add(f"{name}/here/{rank}", 1)
    begin = looked = time.monotonic()
    heartbeat = Heartbeat()
    beats: dict[int, tuple[int, float]] = {}  # rank -> (number of its heartbeats, time of its last change)
    here = store.add(f"{name}/here", 1)
    while here < world_size:
        time.sleep(_POLL)
        _raise_error(store, name)
        here = store.add(f"{name}/here", 0)
        now = time.monotonic()
        if rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0":
            heartbeat.beat(f"waiting for {world_size - here} of {world_size} processes {doing}")
        if rank == 0 and now - looked > _LOOK_EVERY:
            looked = now
            _look_for_lost(store, name, doing, beats)
        if now - begin > _LONGEST:
            raise NoRendezvous(f"{world_size - here} of {world_size} processes did not arrive {doing}")
    _raise_error(store, name)


def _raise_error(store: torch.distributed.Store, name: str) -> None:
    if not store.add(f"{name}/failed", 0):
        return
    text = store.get(f"{name}/error").decode()
    told = store.add(f"{name}/told", 1)
    deadline = time.monotonic() + _LINGER
    while ranks.is_first() and told < ranks.world_size() and time.monotonic() < deadline:
        time.sleep(_POLL / 3)  # rank 0 leaves last: the store ends with it
        told = store.add(f"{name}/told", 0)
    raise BadInput(text)


def _look_for_lost(
    store: torch.distributed.Store, name: str, doing: str, beats: dict[int, tuple[int, float]]
) -> None:
    """Report a rank whose heartbeats have stopped: a lost node does not report itself."""
    now = time.monotonic()
    timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
    for rank in range(ranks.world_size()):
        is_here = store.add(f"{name}/here/{rank}", 0)
        count = store.add(f"{name}/beats/{rank}", 0) + is_here
        if rank not in beats or beats[rank][0] != count:
            beats[rank] = count, now
        elif now - beats[rank][1] > timeout and not is_here:
            text = f"rank {rank} sent no heartbeat for {timeout:.0f} s while the others waited for it {doing}"
            store.compare_set(f"{name}/error", "", text)
            store.add(f"{name}/failed", 1)
