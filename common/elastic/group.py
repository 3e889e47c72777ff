"""A process group of gloo whose collectives end when the members of the job change (members.py).

gloo raises an error at once if a process of the group dies, but it waits for one that is stopped or cut off,
and neither abort() nor torch 2.14's reconfigure() ends that wait. So a wait here has pauses, in which it asks
whether to continue. The group is registered as a backend of its own: a job calls torch.distributed as ever.
"""

import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Backend, ProcessGroup, ProcessGroupGloo

from bootfile.processes.ranks import ELASTIC

_PAUSE, _CONNECTS = datetime.timedelta(seconds=0.2), datetime.timedelta(seconds=3)
_COLLECTIVES = (
    "allgather", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall_base", "barrier",
    "broadcast", "gather", "reduce", "scatter",
)  # fmt: skip
_stuck: list[ProcessGroupGloo] = []  # with a collective that still waits: to free them would wait for it, too


class Broken(RuntimeError):
    """A collective has failed, or was given up."""


class Group(ProcessGroup):
    """A group of gloo. gives_up: asked in the pauses of a wait; if it returns True, the wait ends. failed:
    called with the error of a collective that does not end well; it raises another one."""

    gives_up: Callable[[], bool] = staticmethod(lambda: False)
    failed: Callable[[Broken], object] = staticmethod(lambda error: None)

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stubs know another one
        self._gloo = self._call(ProcessGroupGloo, store, rank, size, _CONNECTS)
        self._gloo._set_default_timeout(timeout)
        self._last: Any = None

    def getBackendName(self) -> str:  # torch's name
        return ELASTIC

    def run(self, name: str, *given: Any, **options: Any) -> "_Work":
        self._last = _Work(self._call(getattr(self._gloo, name), *given, **options), self._call)
        return self._last

    def _call(self, function: Callable, *given: Any, **options: Any) -> Any:
        try:
            return function(*given, **options)
        except RuntimeError as error:
            broken = Broken(next(iter(str(error).splitlines()), ""))
            type(self).failed(broken)
            raise broken from None

    def leave(self) -> None:
        """Let gloo go, with its threads, unless a collective still waits."""
        if self._last and not self._last.is_completed():
            _stuck.append(self._gloo)
        del self._last, self._gloo  # not later: other objects may refer to this group


class _Work(torch._C._distributed_c10d.Work):
    """A collective that was begun. call: of its group."""

    def __init__(self, work: Any, call: Callable):
        super().__init__()
        self._work, self._call = work, call

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return self._call(self._wait)

    def _wait(self) -> bool:
        while True:
            try:
                return self._work.wait(_PAUSE)
            except RuntimeError:
                if self._work.is_completed() or Group.gives_up():
                    raise

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _make(name: str) -> Callable:
    return lambda self, *given, **options: self.run(name, *given, **options)


for _name in _COLLECTIVES:  # torch calls a method for each kind
    setattr(Group, _name, _make(_name))
Backend.register_backend(ELASTIC, Group, devices=["cpu"])
