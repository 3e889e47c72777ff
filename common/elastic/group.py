"""A process group of gloo whose collectives end when the members of the job change (members.py).

gloo raises an error at once if a process of the group dies, but it waits for one that is stopped or cut off,
and neither abort() nor torch 2.14's reconfigure() ends that wait. So a wait here has pauses, in which it asks
whether to continue. The group is registered as a backend of its own: a job calls torch.distributed as ever.
"""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Backend, ProcessGroup, ProcessGroupGloo

from bootfile.processes.ranks import ELASTIC

_PAUSE = datetime.timedelta(seconds=0.2)  # a wait asks so often whether to continue
_CONNECTS = datetime.timedelta(seconds=3)  # the longest wait for the connections of a new group
_COLLECTIVES = (
    "allgather", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall_base", "barrier",
    "broadcast", "gather", "reduce", "scatter",
)  # fmt: skip
_stuck: list[ProcessGroupGloo] = []  # with a collective that still waits: to free them would wait for it, too


class Broken(RuntimeError):
    """A collective has failed, or was given up."""


class Group(ProcessGroup):
    """A group of gloo: the default group of each member of an elastic job, a new one in each generation.

    gives_up: asked in the pauses of a wait; if it returns True, the wait ends. failed: called with the error
    of a collective that does not end well; it raises another one. Members.options() sets both.
    """

    gives_up: Callable[[], bool]
    failed: Callable[[Broken], object]

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stubs know another one
        self._gloo = self._call(ProcessGroupGloo, store, rank, size, _CONNECTS)
        self._gloo._set_default_timeout(timeout)
        self._last: Any = None  # the _Work of the last collective that was begun

    def getBackendName(self) -> str:  # torch's name
        return ELASTIC

    def run(self, name: str, *arguments: Any, **options: Any) -> "_Work":
        """Begin a collective. torch calls it by the names of _COLLECTIVES, in any thread."""
        work = self._call(getattr(self._gloo, name), *arguments, **options)
        self._last = _Work(work, self._call)
        return self._last

    def _call(self, function: Callable, *arguments: Any, **options: Any) -> Any:
        """Return function(). An error of gloo becomes Broken, after failed() was told."""
        try:
            return function(*arguments, **options)
        except RuntimeError as error:
            broken = Broken(next(iter(str(error).splitlines()), ""))
            type(self).failed(broken)
            raise broken from None

    def leave(self) -> None:
        """Free gloo, with its threads, unless a collective still waits. Members.leave_group() calls it at the
        end of a generation."""
        if self._last and not self._last.is_completed():
            _stuck.append(self._gloo)
        del self._last, self._gloo  # not later: other objects may refer to this group


class _Work(torch._C._distributed_c10d.Work):
    """A collective that was begun. call: of its group."""

    def __init__(self, work: Any, call: Callable):
        super().__init__()
        self._work = work
        self._call = call

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return self._call(self._wait)

    def _wait(self) -> bool:
        """Wait for the end of the collective, or until the Group gives up: a part of wait()."""
        while True:
            try:
                return self._work.wait(_PAUSE)
            except RuntimeError:  # an error of the collective, or only the end of a pause
                if self._work.is_completed() or Group.gives_up():
                    raise

    def is_completed(self) -> bool:
        return self._work.is_completed()


for _name in _COLLECTIVES:  # torch calls a method for each kind
    setattr(Group, _name, functools.partialmethod(Group.run, _name))
Backend.register_backend(ELASTIC, Group, devices=["cpu"])
