"""Start the processes of a node if the platform started only the first of them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Any

import torch

from bootfile.ground import errors
from bootfile.ground.errors import ERROR_PIPE, BadInput
from bootfile.machine import threads
from bootfile.machine.cores import available_cores
from bootfile.processes import signals
from bootfile.processes.ends import MemoryKills, describe
from common.ground import endings
from common.platform.signs import STARTED_BY
from common.platform.topology import Topology

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" in the children if their parent holds the store
# A process of a job with its threads for signals, communication and saves; operators and loaders have more.
_TASKS_OF_PROCESS = 8
# seconds from SIGTERM to SIGKILL after another process has failed: enough to finish a save in flight
GRACE = 5.0
# exit codes of a child that has printed why it ends
_EXPLAINED = {errors.BAD_INPUT, errors.NO_RENDEZVOUS, errors.LOST_CONTACT, errors.NOT_SAVED, errors.DIVERGED}
_EXPLAINED |= {errors.INTERRUPTED, *range(128 + 1, 128 + 65)}  # and of one that a signal has asked to stop


def store_options(version: Any = torch.__version__) -> dict[str, Any]:
    """Return the arguments of a TCPStore that gets an open socket: in torch 2.4 to 2.7 its default, libuv,
    cannot take one."""
    return {"use_libuv": False} if version >= "2.4" and version < "2.8" else {}


def hold_store() -> tuple[torch.distributed.Store, str, int]:
    """Return a store of this process, on loopback, with its host and port. The process that starts the others
    of a single node calls it before. Its socket is open, so no other program takes the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = torch.distributed.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        **store_options(),
    )
    return store, host, port


def check_room(count: int) -> None:
    """Raise BadInput if a limit of processes and threads leaves no room for `count` processes of a job. The
    process that starts them calls it before."""
    from bootfile.machine import process_limits

    if line := process_limits.shortage(count * _TASKS_OF_PROCESS, f"{count} processes of this job"):
        raise BadInput(f"{line}, or use fewer --processes_per_node")


def start(topology: Topology, grace: float) -> int:
    """Run this process's command once for every process of the node, and wait until all have ended.

    A job calls it in the process that the platform has started alone on its node, and exits with the code.
    Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets
    them. Signals that ask to stop are passed on; the processes then have `grace` seconds to save and exit.
    When one process fails, the others are ended. Returns the exit code of the one that caused the failure
    (128 + n if signal n ended it), or 0. Raises BadInput if a limit of processes and threads leaves no room.
    """
    count = topology.processes_per_node
    # before the first child: one that finds no room for a thread would only abort
    check_room(count)
    environment, store = _make_environment(topology)
    # the children write their errors here: four ranks that report the same one give one line
    receive_errors, send_errors = os.pipe()
    environment[ERROR_PIPE] = str(send_errors)
    # the handler below is called between any two statements: it reads these two lists
    children: list[subprocess.Popen] = []
    asked: list[tuple[int, float]] = []  # received signals and their times

    def forward(number: int, frame: FrameType | None) -> None:
        """Send a signal to the children: the signal handler of this process."""
        asked.append((number, time.monotonic()))
        presses = [at for received, at in asked if received == signal.SIGINT]
        if presses and presses[-1] - presses[0] > signals.SAME_PRESS:  # Ctrl-C was pressed again
            number = signal.SIGKILL
        for child in children:
            child.send_signal(number)

    # from here on a signal is for the children, and this process waits for their ends
    signals.forget()
    for number in signals.SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    # A child imports torch before it can handle Ctrl-C: it unblocks the signal when it can.
    kills = MemoryKills()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for local_rank in range(count):
        place = {"LOCAL_RANK": str(local_rank), "RANK": str(topology.rank + local_rank)}
        command = [sys.executable, *sys.orig_argv[1:]]
        # after a signal no further one begins
        if not asked:
            children.append(subprocess.Popen(command, env=environment | place, pass_fds=[send_errors]))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if asked:  # a child that was being started when the signal came did not get it
        for child in children:
            child.send_signal(asked[0][0])
    # only the children have it now: the pipe ends when the last of them does
    os.close(send_errors)
    if children:
        node = f" on node {socket.gethostname()}" if topology.nodes > 1 else ""
        code = _wait(children, topology.rank, asked, grace, node, kills)
    else:  # the signal came before the first one
        code = signals.code_after(asked[0][0])
    os.set_blocking(receive_errors, False)  # a child that did not end holds the other end
    with contextlib.suppress(BlockingIOError):
        lines = os.read(receive_errors, 2**16).decode(errors="replace").splitlines(keepends=True)
        sys.stderr.writelines(dict.fromkeys(lines))  # an error that several processes report is shown once
    os.close(receive_errors)
    del store
    return code


def _make_environment(topology: Topology) -> tuple[dict[str, str], torch.distributed.Store | None]:
    """Return (the variables that all processes of the node get, the store if this process holds it, which it
    does for a single node)."""
    count = topology.processes_per_node
    environment = dict(os.environ)
    if topology.nodes == 1:
        store, host, port = hold_store()
        environment[AGENT_STORE] = "True"
    else:
        assert topology.master_host and topology.master_port  # several nodes: topology.resolve() has checked
        host = topology.master_host
        port = topology.master_port
        store = None  # rank 0 holds it
    environment |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(count),
        STARTED_BY: str(os.getpid()),
    }
    # if the user has not chosen: the cores are divided by the processes
    environment.setdefault("OMP_NUM_THREADS", str(threads.share(count)))
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, available_cores() // count)))
    return environment, store


def _wait(
    children: list[subprocess.Popen],
    first_rank: int,
    asked: list[tuple[int, float]],
    grace: float,
    node: str,
    kills: MemoryKills,
) -> int:
    """Wait until all children have ended, or one has failed: then end the others. Return the exit code.

    first_rank: of the children. asked: the signals so far, and their times; the handler adds later ones.
    node: what names the node in a line. kills: made before the children were started.
    """
    # only the process that starts the others needs these
    from bootfile.ground.exit_codes import normalize
    from bootfile.processes.sessions import wait_or_kill

    deadline = 0.0  # of the wait for the child that failed first; 0 until one has failed
    while True:
        # twenty times a second, in the main thread: the handler of signals runs between two looks
        codes = [child.poll() for child in children]
        failed = max(range(len(children)), key=lambda place: _suspicion(codes[place]))
        code = codes[failed]
        # The kernel closes the sockets of a killed process before it ends, so others may end first.
        if code and not deadline:
            deadline = time.monotonic() + GRACE
        is_too_late = code and time.monotonic() > deadline
        if None not in codes or _suspicion(code) > 2 or is_too_late:
            break
        time.sleep(0.05)
    if not code:
        return 0
    if code < 0 and asked and asked[0][0] == signal.SIGINT:
        code = errors.INTERRUPTED  # killed by a second Ctrl-C, or by SIGINT inside a library
    elif asked and code == -asked[0][0]:  # it could not handle the signal yet
        code = signals.code_after(asked[0][0])
    if code < 0 or code not in _EXPLAINED:
        status = -code if code < 0 else code << 8
        who = f"rank {first_rank + failed}{node} (pid {children[failed].pid})"
        print(f"{who} {describe(status, kills)}", file=sys.stderr)
    seconds = GRACE
    if asked:  # the handler has sent them the signal
        seconds += grace
    else:
        for child in children:
            child.terminate()  # it sends nothing to one that has ended
    wait_or_kill(children, seconds)
    return normalize(code)


def _suspicion(code: int | None) -> int:
    """Return how likely it is that the process with this exit code failed first. If it lost another process
    it did not; a library may abort then."""
    if not code:
        return 0
    if code in (endings.LOST_CONTACT, endings.NO_RENDEZVOUS):
        return 1
    if code == -signal.SIGABRT:
        return 2
    return 3 if code > 0 else 4


def die_with_parent() -> None:
    """Make this child end when its parent ends, so that a killed parent leaves no process on the GPUs. Each
    process of a job calls it when it joins the others; one that no launcher of ours has started is left as it
    is."""
    parent = os.environ.get(STARTED_BY)
    # the kernel sends it, also if the parent got SIGKILL and could tell nothing
    if parent and sys.platform == "linux":
        signals.die_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent ended before the call
            sys.exit(128 + signal.SIGTERM)
