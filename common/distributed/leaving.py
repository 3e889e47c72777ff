"""End a process that has joined a process group: its program may not end as any other. A job imports this
module when it meets other processes, or has a GPU."""

import atexit
import contextlib
import multiprocessing
import socket
import threading
from typing import Any

import torch

from bootfile.ground import accelerator, errors
from bootfile.processes import ranks
from bootfile.processes.ends import has_lost_contact
from common.ground import endings
from common.platform.topology import Topology

_TEARDOWN = 3.0  # seconds


def leave_group(topology: Topology, error: BaseException | None) -> None:
    """Exit without the interpreter's teardown, which aborts if a gloo thread still runs; after a lost peer, a
    library may hang in its destructor. BadInput and an interrupt have codes of their own: see entry(). Each
    rank calls it last, when its main() has ended. error: what has ended it; None after its last line."""
    if error is None:
        _destroy_group()
        if multiprocessing.parent_process():  # torchrun --run-path waits until main() returns
            atexit.register(errors.leave, 0)
            return
        errors.leave(0)
    if not isinstance(error, Exception) or isinstance(error, errors.BadInput):
        return
    from bootfile.processes import stuck  # only a run that trains has one

    stuck.explain(error)
    if has_lost_contact(error):
        endings.say_error(
            f"rank {topology.rank} on {socket.gethostname()} lost contact with another process: "
            f"{next(iter(str(error).splitlines()), '')}"
        )
        errors.leave(endings.LOST_CONTACT)
    endings.say_traceback(error)
    errors.leave(1)


def end_alone(error: BaseException | None) -> None:
    """Destroy the group of a process that is alone in it, when main() has ended. What follows main() can then
    run, for example the next cell of a notebook. If the group cannot be destroyed, after an error of the GPU,
    exit. error: what has ended main(); None after its last line."""
    if not torch.distributed.is_initialized() or _destroy_group():
        return
    if error is None:
        errors.leave(0)
    if not isinstance(error, Exception) or isinstance(error, errors.BadInput):
        return
    endings.say_traceback(error)
    errors.leave(1)


def _destroy_group() -> bool:
    """Destroy the group of nccl, within 3 s, and return whether it is destroyed. Do nothing with gloo, and
    return True: in torch 2.1 it would deadlock if a thread of gloo waits for the interpreter's lock."""
    if ranks.uses_gloo():
        return True
    module = accelerator.of(accelerator.kind())
    is_destroyed = threading.Event()

    def destroy(device: Any) -> None:  # in a thread: with a lost peer it may not return
        with contextlib.suppress(Exception):  # an error of the GPU, which has ended main()
            module.set_device(device)  # a new thread uses GPU 0 by default
            torch.distributed.destroy_process_group()
            is_destroyed.set()

    with contextlib.suppress(Exception):
        ending = threading.Thread(target=destroy, args=[module.current_device()], daemon=True)
        ending.start()
        ending.join(_TEARDOWN)
    return is_destroyed.is_set()
