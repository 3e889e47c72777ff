"""Texts in the store of a job, which are read without waiting for them.

The get() of a store waits for a key, torch 2.1 has no check(), and its compare_set() ends the process with
SIGSEGV if the answer has less than two bytes (pytorch/pytorch#123983, seen with torch 2.1.2). set(), get()
and add() do on every version what is needed here.
"""

import time
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # a build of torch may have no torch.distributed
    from torch._C._distributed_c10d import Store

_SOON = 2.0  # seconds in which the process that was first writes its text
_POLL = 0.02


def write(store: "Store", key: str, text: str) -> None:
    """Write a text; a later one replaces it."""
    store.set(key, text)
    store.add(f"{key}/written", 1)


def read(store: "Store", key: str) -> str:
    """Return a text; "" if no process has written it."""
    return cast(str, store.get(key).decode(errors="replace")) if store.add(f"{key}/written", 0) else ""


def write_first(store: "Store", key: str, text: str) -> str:
    """Write a text if this process is the first that does. Return the text of the first process, after it has
    written it.

    All processes that write this key call write_first(). If the first one is killed before it has written its
    text, the next text counts.
    """
    if store.add(f"{key}/claimed", 1) > 1:
        deadline = time.monotonic() + _SOON
        while time.monotonic() < deadline:
            if first := read(store, key):
                return first
            time.sleep(_POLL)
    write(store, key, text)
    return text
