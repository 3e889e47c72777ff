"""Run a program in a fork of a process that has imported torch, which saves seconds of each start.

The fork server is that of multiprocessing. The program runs as `__main__`, with its own arguments,
environment, folder, session and output. What it starts itself, as a launcher its ranks, is a fork, too
(nursery.py).
"""

import atexit
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import forkserver
from unittest import mock

from tests.support import forked_program, nursery

_PIPES = (subprocess.PIPE, subprocess.STDOUT)
_CONTEXT = multiprocessing.get_context("forkserver")
_PACKAGES = [
    "torch", "torch._dynamo", "torchvision", "torch.utils.tensorboard",
    "sklearn.datasets", "cv2", "simplejpeg", "boto3", "pydantic", "psutil", "torch.distributed.run",
]  # fmt: skip


def can_fork(words: list[str], options: dict, usual: dict[str, str]) -> bool:
    """Return whether start() can run the words: a script, a module or code, with these options of Popen.

    usual: the environment in which the fork server starts. forked_program.can_run() compares the
    environment of the program with it.
    """
    known = not options.keys() - {"cwd", "env", "stderr", "start_new_session"}
    return known and options["stderr"] in _PIPES and forked_program.can_run(words, options["env"], usual)


class Forked:
    """A program in a fork, with the members of subprocess.Popen that the tests use."""

    def __init__(self, words: list[str], process, stdout, stderr) -> None:
        self.args, self.pid, self._process = words, process.pid, process
        self.stdout, self.stderr = stdout, stderr
        self._texts: dict = {}
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:  # multiprocessing reads the exit code from a pipe, once
            return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        """Wait until both outputs are closed and the program has ended, and return the outputs."""
        streams = [stream for stream in (self.stdout, self.stderr) if stream]
        if not self._readers:
            for stream in streams:
                self._readers.append(threading.Thread(target=self._read, args=[stream], daemon=True))
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return self._texts[self.stdout], self._texts.get(self.stderr)

    def _read(self, stream) -> None:
        with stream:
            self._texts[stream] = stream.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(words: list[str], options: dict, usual: dict[str, str]) -> Forked:
    """Start `python *words` in a fork. The arguments are those of can_fork()."""
    path = _path_of_a_new_python()
    _ensure_server(usual)
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(1 if options["stderr"] == subprocess.STDOUT else 2)]
    writers = [pipes[0][1], pipes[-1][1]]
    process = _CONTEXT.Process(target=_run_program, args=(words, options, usual, path, writers))
    process.start()
    streams = [os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes]
    for end in itertools.chain(*pipes):
        end.close()
    return Forked(words, process, *streams, *[None] * (2 - len(streams)))


@atexit.register
def _kill_what_a_test_left() -> None:
    """End the programs that still run: multiprocessing would wait for them at the end of this process."""
    for process in multiprocessing.active_children():
        process.kill()


def _ensure_server(usual: dict[str, str]) -> None:
    _CONTEXT.set_forkserver_preload(_PACKAGES)
    variables = usual | forked_program.ROOM | forked_program.PRESET
    with mock.patch.dict(os.environ, variables, clear=True):
        forkserver.ensure_running()


@functools.cache
def _path_of_a_new_python() -> list[str]:
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    return subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()


def _run_program(
    words: list[str], options: dict, usual: dict[str, str], path: list[str], outputs: list
) -> None:
    """Run the program in this process, and end the process as Python ends."""
    atexit.unregister(_kill_what_a_test_left)  # it belongs to the process of the tests
    if options.get("start_new_session"):
        os.setsid()
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
    for output in outputs:
        output.close()
    nursery.open_for(words, str(options["cwd"]), usual, path)
    forked_program.run(words, options["env"], str(options["cwd"]), path)
