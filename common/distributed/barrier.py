"""A barrier that may take hours. It uses a store, because --timeout limits every collective.

A node may work for long before all can continue (fetch data, restore a checkpoint), and nodes need different
times. In the store a process reports that it is alive, that it is done, or its error. After an error all
processes end with the same line.

A rank waits in one call of the store until the key of the next *tick* exists. A tick ends the wait, or is
one in ten seconds: then a rank logs what it waits for, and its idle connection is not closed by a network.
Rank 0, which looks for lost ranks, and the first rank that came write the ticks, and look ten times a second.
"""

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Iterator

import torch

from bootfile.ground.errors import BadInput
from bootfile.ground.heartbeat import Heartbeat
from bootfile.processes import ranks, texts
from common.ground.endings import NO_RENDEZVOUS, NoRendezvous
from common.platform.place import has_local_rank_0

# seconds
_POLL = 0.1  # between two looks of a rank that writes ticks
_LOOK_EVERY = 2.0  # between two looks of rank 0 for lost ranks
_TICK = 10.0  # between ticks while nothing happens
_LONGEST = 6 * 3600  # the longest wait
_LINGER = 3.0  # the longest wait of rank 0 until the others have read an error
_BEAT = 2.0  # between two heartbeats of beating()
_SHOWN = 16  # missing ranks named in an error

_beats: dict[str, float] = {}  # name of a barrier -> when this process sent its last heartbeat


def beat(name: str) -> None:
    """Send a heartbeat, at most one a second, while the other ranks wait at this barrier. A rank calls it
    often in its long task before the barrier: without heartbeats it counts as lost. Raises BadInput if
    another process has failed at the barrier."""
    store = ranks.store()
    # a loop may call this for each file: one heartbeat a second is enough, and costs a round trip
    if store and time.monotonic() - _beats.get(name, 0.0) > 1:
        _beats[name] = time.monotonic()
        store = torch.distributed.PrefixStore(name, store)
        store.add(f"beats/{ranks.rank()}", 1)
        _raise_error(store, ranks.rank(), ranks.world_size())


@contextlib.contextmanager
def beating(name: str) -> Iterator[None]:
    """Send heartbeats to the ranks that wait at this barrier during the block, which may take hours. A rank
    enters it for a long task before the barrier that cannot call beat(); a thread sends them. Without them
    the others would give up."""
    ended = threading.Event()

    def send() -> None:
        """Send heartbeats until the block ends; in the thread."""
        with contextlib.suppress(BadInput):  # wait_for_all() raises the error of the other process, too
            while not ended.wait(_BEAT):
                beat(name)

    thread = threading.Thread(target=send, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_for_all(name: str, doing: str, error: BadInput | None = None) -> None:
    """Wait until every rank has arrived, for up to six hours. Log at intervals what it waits for.

    Every rank calls it, also one that has an error: the others would wait for it.

    name: the name of the barrier. doing: completes "waiting for 3 of 8 processes ...". error: the reason why
    this process cannot continue. Raises BadInput with the same text on every rank if one has an error, and
    NoRendezvous if one is lost, or after six hours.
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

    limit: seconds to wait for all, at most six hours.
    silence: seconds without a heartbeat after which a rank is lost; None: forever.
    """
    store = torch.distributed.PrefixStore(name, store)
    limit = min(limit, _LONGEST)
    ticks = store.add("ticks", 0)  # read before this rank arrives: the last tick comes later
    if error:
        here = _report(store, world_size, error.code, f"{error} (rank {rank} on {socket.gethostname()})")
    else:
        # a process that takes the place of one that has ended while it waited is counted once
        is_first = store.add(f"here/{rank}", 1) == 1
        here = store.add("here", int(is_first))
        if here >= world_size:
            tick(store)
    # two of all ranks poll the store; a thousand others sleep in it
    is_waker = rank == 0 or here == 1
    heartbeat = Heartbeat()
    looked_at = 0.0  # in seconds of the heartbeat, as ticked_at
    ticked_at = 0.0
    beats: dict[int, tuple[int, float]] = {}  # rank -> (number of its heartbeats, time of its last change)
    while here < world_size:
        absent = world_size - here
        if has_local_rank_0():
            heartbeat.beat(f"waiting for {absent} of {world_size} processes {doing}".rstrip())
        # only rank 0 reports a lost rank: the others learn of it with the next tick
        if silence and rank == 0 and heartbeat.seconds - looked_at > _LOOK_EVERY:
            looked_at = heartbeat.seconds
            _look_for_lost(store, doing, beats, world_size, silence)
        if heartbeat.seconds > limit:
            missing = [other for other in range(world_size) if not store.add(f"here/{other}", 0)]
            text = f"{len(missing)} of {world_size} processes did not arrive {doing}".rstrip()
            text += f" within {limit:.0f} s: ranks {missing[:_SHOWN]}"
            _report(store, world_size, NO_RENDEZVOUS, text)
        elif not is_waker:
            ticks += 1
            wait_for(store, f"tick/{ticks}", limit + 1 - heartbeat.seconds)
        elif heartbeat.seconds - ticked_at > _TICK:
            ticked_at = heartbeat.seconds
            tick(store)
        else:
            time.sleep(_POLL)
        # after a tick, or a tenth of a second: an error counts as if all had come
        here = store.add("here", 0)
    _raise_error(store, rank, world_size)


def wait_for(store: torch.distributed.Store, key: str, seconds: float) -> None:
    """Wait until the key exists, the seconds have passed, or the store has closed. A thread calls the store:
    Ctrl-C interrupts only a wait for a thread."""

    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # the next call of the store raises it again
            store.wait([key], datetime.timedelta(seconds=seconds))

    # the main thread waits for this one, and can handle a signal meanwhile
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join()


def tick(store: torch.distributed.Store) -> None:
    """Wake the ranks that wait: write the key of the next tick, after what they have to read."""
    store.set(f"tick/{store.add('ticks', 1)}", "")


def _report(store: torch.distributed.Store, world_size: int, code: int, text: str) -> int:
    """End the wait with an error, unless there is one. Return the number of ranks that are here.

    world_size: the number of ranks that rank 0 waits for until they have read the error.
    """
    # the first error counts: those of the others mostly follow from it
    texts.write_first(store, "error", f"{code} {world_size} {text}")
    # now every rank leaves its loop, also if some have not come
    here = store.add("here", world_size)
    tick(store)
    return here


def _raise_error(store: torch.distributed.Store, rank: int, world_size: int) -> None:
    """Raise the error of this barrier, if there is one. Each rank calls it at the end of its wait."""
    error = texts.read(store, "error")
    if not error:
        return
    code, expected, text = error.split(" ", 2)
    # the layouts of the ranks may differ: the one that found it out knows how many ranks there may be
    world_size = max(world_size, int(expected))
    told = store.add("told", 1)
    deadline = time.monotonic() + _LINGER
    while rank == 0 and told < world_size and time.monotonic() < deadline:
        time.sleep(_POLL)  # rank 0 leaves last: the store ends with it
        told = store.add("told", 0)
    if int(code) == NO_RENDEZVOUS:
        raise NoRendezvous(text)
    raise BadInput(text)


def _look_for_lost(
    store: torch.distributed.Store,
    doing: str,
    beats: dict[int, tuple[int, float]],
    world_size: int,
    silence: float,
) -> None:
    """Report a rank whose heartbeats have stopped: a lost node does not report itself. Rank 0 calls it every
    two seconds of its wait. beats: what it saw before; it is changed."""
    keys = [f"here/{rank}" for rank in range(world_size)]
    keys += [f"beats/{rank}" for rank in range(world_size)]
    if not beats:  # the first call
        for key in keys:
            store.add(key, 0)  # a key that does not exist would be waited for
    # the ranks send only counts: the times are those of this clock, as clocks of nodes may differ
    now = time.monotonic()
    values = [int(value) for value in store.multi_get(keys)]
    for rank, (is_here, count) in enumerate(zip(values, values[world_size:], strict=False)):
        if rank not in beats or beats[rank][0] != count:
            beats[rank] = count, now
        elif now - beats[rank][1] > silence and not is_here:
            text = f"rank {rank} sent no heartbeat for {silence:.0f} s while the others waited for it {doing}"
            _report(store, world_size, NO_RENDEZVOUS, text)
