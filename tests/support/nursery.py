"""Fork the children of a forked program, too: a launcher would start a new Python for each of its ranks.

The nursery of a program is a fork of it from before it ran, so it has torch and nothing of the program. The
program sends it the command, the variables and the files of a child. The nursery forks twice and the process
in between ends: the kernel then makes the program the parent. So the program has a child of its own, with a
process id, signals and an exit code, as from subprocess. What a fork cannot do is a new Python, as before.
"""

import ctypes
import functools
import inspect
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from tests.support import forked_program

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FREE = 200  # numbers of files from here on are used by nothing
_LONGEST = 100_000  # bytes of a request
_STARTERS = {"launch", "bootfile", "torch.distributed.run", "torch.distributed.launch"}


def starts_programs(words: list[str], folder: str) -> bool:
    """Return whether a program starts others, as far as its command and its code show it."""
    options = ("--processes_per_node", "--elastic")
    if (words[0] == "-m" and words[1] in _STARTERS) or any(word.startswith(options) for word in words):
        return True
    code = words[1] if words[0] == "-c" else ""
    if words[0].endswith(".py") and os.path.isfile(os.path.join(folder, words[0])):
        with open(os.path.join(folder, words[0]), encoding="utf-8", errors="replace") as file:
            code = file.read()
    return "subprocess" in code


def open_for(words: list[str], folder: str, usual: dict[str, str], path: list[str]) -> None:
    """Fork the nursery, if the program starts others. It is called right before the program runs.

    folder: in which it runs. usual: the environment in which torch was imported. path: sys.path of a new
    Python.
    """
    if not starts_programs(words, folder):
        return
    program = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        _serve(theirs, program, usual, path)
    theirs.close()
    nursery = _Nursery(ours, program, usual)
    execute_child = subprocess.Popen._execute_child
    signature = inspect.signature(execute_child)

    @functools.wraps(execute_child)
    def execute_or_fork(popen: subprocess.Popen, *args: Any) -> None:
        options = signature.bind(popen, *args).arguments
        popen.pid = nursery.fork(options)
        if popen.pid is None:
            execute_child(popen, *args)
            return
        popen._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(options[name] for name in names))

    subprocess.Popen._execute_child = execute_or_fork
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_or_fork(executable: str, args: list[str], files: list[int]) -> int:
        pid = None
        if "multiprocessing.forkserver" in args[-1]:  # it preloads torch; the others take no time
            pid = nursery.fork({"args": args, "pass_fds": files})
        return pid or spawn(executable, args, files)

    multiprocessing.util.spawnv_passfds = spawn_or_fork


class _Nursery:
    """The side of the program."""

    def __init__(self, connection: socket.socket, program: int, usual: dict[str, str]):
        self._connection, self._program, self._usual = connection, program, usual
        self._lock = threading.Lock()

    def fork(self, options: dict[str, Any]) -> int | None:
        """Return the process id of a child; None if it has to be a new Python.

        options: those of Popen._execute_child(); what is left out is the default of Popen.
        """
        ends_by = 0
        before = options.get("preexec_fn")
        if getattr(getattr(before, "func", None), "__name__", "") == "die_with_parent":
            (ends_by,) = before.args
            before = None
        command = options["args"]
        environment = {**os.environ} if options.get("env") is None else {**options["env"]}
        folder = os.path.abspath(options.get("cwd") or os.getcwd())
        is_command = not isinstance(command, str | bytes | os.PathLike)
        program, *words = [os.fsdecode(word) for word in command] if is_command else [""]
        while words and words[0] in ("-u", "-B"):  # as the process of the tests: its pipes have no buffer
            del words[0]
        is_plain = not before and options.get("umask", -1) == -1 and not options.get("shell")
        is_plain = is_plain and not any(options.get(name) for name in ("uid", "gid", "gids", "executable"))
        if (
            os.getpid() != self._program  # a worker of it
            or not (is_plain and program == sys.executable and os.path.isdir(folder))
            or not forked_program.can_run(words, environment, self._usual)
        ):
            return None
        targets = [0, 1, 2, *options.get("pass_fds", ())]
        files = [*targets]
        for target, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if options.get(name, -1) != -1:
                files[target] = options[name]
        request = {
            "words": words,
            "environment": environment,
            "folder": folder,
            "files": targets,
            "ends_by": ends_by,
            "has_session": bool(options.get("start_new_session")),
            "group": options.get("process_group", -1),
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "ignored": [number for number in signal.valid_signals() if _is_ignored(number)],
        }
        data = json.dumps(request).encode()
        if len(data) > _LONGEST:
            return None
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [data], files)
                pid = int(self._connection.recv(100) or 0)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise ChildProcessError("the nursery has ended")
        return pid


def prctl(option: int, value: int) -> None:
    """Call prctl() of the C library."""
    ctypes.CDLL(None).prctl(option, value)


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ)


def _serve(connection: socket.socket, program: int, usual: dict[str, str], path: list[str]) -> None:
    """Fork a child for each request, until the program has ended."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != program:
        os._exit(0)
    os.environ.clear()
    forked_program.show_in_proc(["-c", "the nursery of the tests"], {})
    number = connection.fileno()
    os.closerange(3, number)
    os.closerange(number + 1, 1000)
    for standard in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    os.closerange(3, number)
    while True:
        data, files, _, _ = socket.recv_fds(connection, 2 * _LONGEST, 100)
        if not data:
            os._exit(0)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            _run(json.loads(data), files, connection, program, usual, path)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _run(
    request: dict[str, Any],
    files: list[int],
    connection: socket.socket,
    program: int,
    usual: dict[str, str],
    path: list[str],
) -> None:
    """Become the child of the program, and run its command: this process, a fork of the nursery."""
    between = os.getppid()
    while os.getppid() != program:
        if os.getppid() not in (program, between):  # the program has ended
            os._exit(1)
        time.sleep(0.0005)
    prctl(_PR_SET_PDEATHSIG, request["ends_by"])
    if request["has_session"]:
        os.setsid()
    if request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    # above all that is used, then in their places
    moved = [os.dup2(file, _FREE + place) for place, file in enumerate(files)]
    answer = os.dup2(connection.fileno(), _FREE + len(files))
    os.closerange(3, _FREE)
    for file, target in zip(moved, request["files"], strict=True):
        os.dup2(file, target)
    os.write(answer, str(os.getpid()).encode())
    os.closerange(_FREE, _FREE + len(files) + 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has replaced that of the server
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    server = multiprocessing.forkserver._forkserver
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None
    open_for(request["words"], request["folder"], usual, path)
    forked_program.run(request["words"], request["environment"], request["folder"], path)
