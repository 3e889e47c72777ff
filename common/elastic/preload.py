"""What a job imports late: the fork server imports it, from which agent.py forks the processes of a job."""

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading

from bootfile.processes import signals
from common.platform.signs import STARTED_BY

# The fork server of multiprocessing ends with the agent, and not by a signal to all processes of the job: its
# forks end with it, and they have to save.
signals.die_with_parent(signal.SIGKILL)
if os.getppid() != int(os.environ[STARTED_BY]):
    sys.exit(128 + signal.SIGKILL)


def _continue(number: int, frame: object) -> None:
    """Do nothing: a signal handler of the fork server."""


def reset_signals() -> None:
    """Let signals end this process again: each fork calls it first, as it has the handlers of the server."""
    for number in signals.SIGNALS:
        if signal.getsignal(number) is _continue:
            signal.signal(number, signal.SIG_DFL)


for _number in {*signals.SIGNALS} - {signal.SIGINT}:  # multiprocessing itself ignores SIGINT there
    if signal.getsignal(_number) is signal.SIG_DFL:
        signal.signal(_number, _continue)
# The forks inherit the id of their parent. They cannot look it up: if the fork server has just ended, each
# has another parent already, and would live for ever.
os.environ[STARTED_BY] = str(os.getpid())
gc.disable()  # what is imported stays: no search for garbage among it, also at the end of each fork
for _name in ("torch._dynamo", "torch.utils.tensorboard", "bootfile.exact.replicas"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
with contextlib.suppress(ImportError):
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # tqdm's own is one of all processes, which a killed one leaves behind
gc.freeze()
gc.enable()
