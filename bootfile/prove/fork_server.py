"""Run scripts in forks of this process, which has PyTorch loaded: its import takes most of a short run.

`python fork_server.py` reads a request from each line of its standard input, as JSON: `words` (the script and
its options), `folder`, `environment`, and `log`, the file for the output. It answers with two lines: the
process id, and the exit code when the script has ended. A script runs as `__main__`, in its own session.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from typing import Any, TextIO

# torch._dynamo is imported by the first step of an optimizer
_PACKAGES = ("torch", "torch._dynamo", "torch.utils.tensorboard", "torchvision")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until the standard input ends. Forks (forks.py) starts it and sends them."""
    del sys.path[0]  # this folder: its modules have general names
    gc.disable()  # what is imported stays: no search for garbage among it, also at the end of each fork
    for name in _PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    # copies: a script gets other files as its standard input and output
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    child = 0
    for line in requests:
        if child:  # not at its end: until the answer was read, a signal must reach it, and nothing else
            os.waitpid(child, 0)
        child = os.fork()
        if not child:
            _run(json.loads(line), requests, answers)
            return  # and end as Python ends
        ended: Any = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        is_exit = ended.si_code == os.CLD_EXITED
        print(ended.si_status if is_exit else -ended.si_status, file=answers, flush=True)


def _run(request: dict[str, Any], requests: TextIO, answers: TextIO) -> None:
    """Run a script in this process, a fork of the server, as `python *words` would."""
    # a session of its own: it is killed with all that it starts, and the server stays
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # when the server ends
    print(os.getpid(), file=answers, flush=True)  # now its session can be killed
    requests.close()
    answers.close()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(request["environment"])
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads not in (None, before) and "torch" in sys.modules:  # which has read it at its import
        sys.modules["torch"].set_num_threads(int(threads))
    if "numpy" in sys.modules:  # all forks have its random state; Python seeds its own again
        sys.modules["numpy"].random.seed()
    words = request["words"]
    sys.argv = words
    sys.orig_argv = [sys.executable, *words]
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
