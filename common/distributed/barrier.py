"""Waiting for each other for hours, where --timeout bounds every collective: through the store in which the
processes met.

What one node has to do before the others can go on (fetch data, restore a checkpoint) takes long, and not
equally long everywhere. A process says there that it is done, that it is alive, or what went wrong: then all
end with that one line.
"""

import os
import socket
import time

from common.exits import BadInput, NoRendezvous

_POLL, _LOOK_EVERY, _SAY_EVERY, _LONGEST, _LINGER = 0.2, 2.0, 30.0, 6 * 3600, 3.0  # seconds

_store, _rank, _world_size, _timeout = None, 0, 1, 300.0
_beats: dict[str, float] = {}


def share(store, rank: int, world_size: int, timeout: float) -> None:
    """The processes have met in this torch.distributed store. timeout: seconds without a sign of life."""
    global _store, _rank, _world_size, _timeout
    _store, _rank, _world_size, _timeout = store, rank, world_size, timeout


def alive(name: str) -> None:
    """To be called now and then by who makes the others wait. Raises BadInput where another process had
    trouble with the same thing."""
    if _world_size > 1 and time.monotonic() - _beats.get(name, 0.0) > 1:
        _beats[name] = time.monotonic()
        _store.add(f"{name}/beats/{_rank}", 1)
        _raise_trouble(name)


def everybody(name: str, doing: str, trouble: BadInput | None = None) -> None:
    """Wait until every process has come here, up to six hours. Says now and then what is waited for.

    doing: completes "waiting for 3 of 8 processes ...". trouble: why this process cannot go on. Raises
    BadInput on every process where one had trouble, the same text; NoRendezvous where one fell silent.
    """
    if _world_size == 1:
        if trouble:
            raise trouble
        return
    if trouble:
        where = f"{trouble} (rank {_rank} on {socket.gethostname()})"
        _store.compare_set(f"{name}/trouble", "", where)
        _store.add(f"{name}/troubled", 1)
        _raise_trouble(name)
    _store.add(f"{name}/here/{_rank}", 1)
    begin = said = looked = time.monotonic()
    seen: dict[int, tuple[int, float]] = {}
    here = _store.add(f"{name}/here", 1)
    while here < _world_size:
        time.sleep(_POLL)
        _raise_trouble(name)
        here = _store.add(f"{name}/here", 0)
        now = time.monotonic()
        if now - said > _SAY_EVERY:
            said = now
            if (
                _rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0"
            ):  # a silent node is taken for a hung one
                print(
                    f"waiting for {_world_size - here} of {_world_size} processes {doing} "
                    f"({now - begin:.0f} s)",
                    flush=True,
                )
        if _rank == 0 and now - looked > _LOOK_EVERY:
            looked = now
            _look_for_silent(name, doing, seen)
        if now - begin > _LONGEST:
            raise NoRendezvous(f"{_world_size - here} of {_world_size} processes did not come {doing}")
    _raise_trouble(name)


def _raise_trouble(name: str) -> None:
    if not _store.add(f"{name}/troubled", 0):
        return
    text = _store.get(f"{name}/trouble").decode()
    told = _store.add(f"{name}/told", 1)
    deadline = time.monotonic() + _LINGER
    while _rank == 0 and told < _world_size and time.monotonic() < deadline:  # the store goes with rank 0
        time.sleep(_POLL / 3)
        told = _store.add(f"{name}/told", 0)
    raise BadInput(text)


def _look_for_silent(name: str, doing: str, seen: dict[int, tuple[int, float]]) -> None:
    """A node that is lost does not say so. seen: rank -> (beats, when they were counted first)."""
    now = time.monotonic()
    for rank in range(_world_size):
        beats = _store.add(f"{name}/beats/{rank}", 0) + _store.add(f"{name}/here/{rank}", 0)
        if rank not in seen or seen[rank][0] != beats:
            seen[rank] = beats, now
        elif now - seen[rank][1] > _timeout and not _store.add(f"{name}/here/{rank}", 0):
            text = f"rank {rank} has given no sign of life for {_timeout:.0f} s: it was waited for {doing}"
            _store.compare_set(f"{name}/trouble", "", text)
            _store.add(f"{name}/troubled", 1)
