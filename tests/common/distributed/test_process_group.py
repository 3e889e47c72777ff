"""process_group.py chooses the right backend and ends a group."""

import argparse
import os
import re
import signal
import socket
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from bootfile.ground import errors
from bootfile.ground.errors import BadInput
from bootfile.processes.ends import has_lost_contact
from common.distributed import leaving, process_group
from common.ground import endings
from common.platform.topology import Topology
from tests.conftest import (
    LONGEST,
    QUICK,
    ROOT,
    environment,
    finish,
    names,
    processes_of,
    refused,
    run,
    start,
    wait_until,
)

# A process sees one GPU: its own, or one for all. The UUID shows it, which torch has since 2.4.
MEET = textwrap.dedent(f"""
    import argparse, os, sys
    from types import SimpleNamespace
    import torch
    sys.path.insert(0, {str(ROOT)!r})
    from common.console.arguments import Parser
    from common.distributed import devices, launcher, process_group
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    uuid = sys.argv[1].format(os.environ.get("LOCAL_RANK"))
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(**{{"uuid": uuid}} if uuid else {{}})
    parser = Parser(None)
    process_group.add_arguments(parser)
    args = parser.parse_args(["--processes_per_node=2"])
    args.enable_gpu = None
    topology = devices.find_topology(args)
    if topology.starts_processes:
        sys.exit(launcher.start(topology, 5))
    found = process_group.meet(args, topology)
    print(f"{{topology.rank}}: {{found['backend']}} {{found.get('device_id')}}\\n", end="", flush=True)
    os._exit(0)
""")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("uuid", "backend"), [("GPU-{}", "nccl cuda:0"), ("GPU-0", "gloo None"), ("", "gloo None")]
)
def test_a_launcher_may_show_each_process_its_own_gpu_only(uuid, backend):
    done = run("-c", MEET, uuid)
    if torch.__version__ < "2.3":
        backend = f"{backend.split()[0]} None"
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {backend}" for rank in range(2)]


def test_an_nccl_group_is_left_on_the_own_gpu(monkeypatch):
    did = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.append((threading.get_ident(), device)))
    ending = lambda: did.append((threading.get_ident(), "left"))  # noqa: E731
    monkeypatch.setattr(torch.distributed, "destroy_process_group", ending)
    monkeypatch.setattr(errors, "leave", did.append)
    leaving.leave_group(Topology(0, 1, 2, 0, None, None, "node", "plain"), None)
    (first, device), (second, left), code = did
    assert (device, left, code) == (3, "left", 0) and first == second != threading.get_ident()


def test_a_group_that_cannot_be_destroyed_ends_a_process_that_is_alone(monkeypatch, capsys):
    """After an error of the GPU, NCCL may raise one in its destructor, or never return."""
    did = []

    def destroy():
        did.append("destroyed")
        if problem == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if problem == "hangs":
            hanging.wait()

    hanging = threading.Event()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy)
    monkeypatch.setattr(errors, "leave", did.append)
    for problem, error, code in (
        ("", None, None),
        ("", ValueError("x"), None),
        ("hangs", None, 0),
        ("raises", ValueError("y"), 1),
        ("raises", BadInput("z"), None),
    ):
        monkeypatch.setattr(leaving, "_TEARDOWN", 0.1 if problem == "hangs" else LONGEST)
        leaving.end_alone(error)
        assert did == ["destroyed", *([] if code is None else [code])], problem
        did.clear()
    hanging.set()
    assert capsys.readouterr().err == "ValueError: y\n"


def test_an_error_of_the_user_is_no_lost_contact():
    lost = ("Socket Timeout", "Broken pipe", "NCCL communicator was aborted", "Connection reset by peer")
    assert all(has_lost_contact(RuntimeError(text)) for text in lost)
    assert not has_lost_contact(RuntimeError("cannot store the sample in the cache"))


ALONE = """
import runpy, sys
from bootfile.ground import accelerator
from common.checkpoint.checkpointer import Checkpointer
from common.distributed import devices, process_group
def meet(args, topology, real=process_group.meet):
    devices.count_gpus, accelerator.backend = lambda args: 1, lambda: "gloo"  # as with a GPU
    return real(args, topology)
process_group.meet = meet
if sys.argv[1] == "fails":
    Checkpointer.finish = lambda self: 1 / 0
sys.argv = sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("after main()")
"""


@pytest.mark.parametrize(("end", "code"), [("succeeds", 0), ("fails", 1)])
def test_a_process_alone_on_a_gpu_ends_as_any_program(end, code, tmp_path):
    """What follows main() runs: a profiler, atexit, the next cell of a notebook."""
    job = ("jobs/train_ddp.py", *QUICK, "--batch_size=240", "--max_steps=1", f"--output_dir={tmp_path}")
    done = run("-c", ALONE, end, *job, code=code)
    assert done.stdout.endswith("after main()\n")
    assert ("ZeroDivisionError" in done.stderr) == (end == "fails")


def test_a_group_of_one_gpu_is_left(monkeypatch):
    """nccl warns of a group that is not destroyed."""
    left = []
    monkeypatch.setattr(endings, "at_end", lambda place, end: left.append(place))
    monkeypatch.setattr(process_group.rendezvous, "meet", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    args = argparse.Namespace(timeout=1.0, enable_gpu=None)
    for gpus in (0, 1):
        monkeypatch.setattr(process_group.devices, "count_gpus", lambda _, gpus=gpus: gpus)
        process_group.meet(args, Topology(0, 1, 1, 0, None, None, "node", "plain"))
        assert len(left) == gpus


@pytest.mark.parametrize(
    ("nodes", "backend", "preset", "chosen"),
    [
        (2, "nccl", {}, {"NCCL": "=eth7"}),
        (2, "nccl", {"NCCL": "ib0"}, {"NCCL": "ib0"}),
        (1, "nccl", {}, {}),
        (1, "gloo", {}, {"GLOO": "eth7"}),
        (2, "gloo", {"GLOO": "ib0"}, {"GLOO": "ib0"}),
    ],
)
def test_the_interface_to_the_master_is_used(nodes, backend, preset, chosen, monkeypatch, capfd):
    for kind in ("NCCL", "GLOO"):
        monkeypatch.setenv(f"{kind}_SOCKET_IFNAME", preset.get(kind, ""))
        if kind not in preset:
            monkeypatch.delenv(f"{kind}_SOCKET_IFNAME")
    monkeypatch.setattr(process_group.network, "interface_to", lambda *_: ("eth7", "10.0.0.7"))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "eth7")])
    process_group.choose_interface(Topology(0, nodes, 2, 0, "10.0.0.1", 1234, "node", "plain"), backend)
    for kind in ("NCCL", "GLOO"):
        assert os.environ.get(f"{kind}_SOCKET_IFNAME") == chosen.get(kind)
    assert ("NCCL_SOCKET_IFNAME==eth7" in capfd.readouterr().out) == (chosen == {"NCCL": "=eth7"})


@pytest.mark.parametrize("host, chosen", [("node1", "eth7"), ("localhost", "lo"), ("127.0.1.1", "lo")])
def test_a_master_whose_own_hosts_file_names_loopback(host, chosen, monkeypatch):
    """Debian gives a machine's own name the address 127.0.1.1: the other nodes need another interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # the test ends as if it was not set
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    places = {host: ("lo", "127.0.1.1"), process_group.network.OUTSIDE: ("eth7", "10.0.0.7")}
    monkeypatch.setattr(process_group.network, "interface_to", lambda name, port: places[name])
    process_group.choose_interface(Topology(0, 2, 2, 0, host, 1234, "node", "plain"), "gloo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == chosen


@pytest.mark.parametrize(
    ("variable", "given", "is_missing"),
    [
        ("GLOO", "eth0", False),
        ("GLOO", "eth0,docker0", False),
        ("GLOO", "eth", True),
        ("GLOO", "eth0,eth99", True),
        ("GLOO", "", False),
        ("NCCL", "eth", False),
        ("NCCL", "ib,eth", False),
        ("NCCL", "=eth", True),
        ("NCCL", "=eth0", False),
        ("NCCL", "ib", True),
        ("NCCL", "^docker,lo", False),
        ("NCCL", "^docker,lo,eth", True),
        ("NCCL", "^=eth", False),
        ("NCCL", "^=lo,eth0,docker", False),
    ],
)
def test_a_chosen_interface_must_exist(variable, given, is_missing, monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "docker0")])
    error = process_group.network.explain_interfaces(f"{variable}_SOCKET_IFNAME", given)
    assert bool(error) == is_missing and (not error or error.endswith("this node has lo, eth0, docker0"))


def test_a_missing_interface_is_refused():
    line = refused(
        "jobs/train_ddp.py", *QUICK, "--processes_per_node=2", env=environment(GLOO_SOCKET_IFNAME="eth99")
    )
    assert names(line, "GLOO_SOCKET_IFNAME=eth99", "no such interface", "lo")


# Holds the interpreter's lock while it waits. Gloo's destructor in torch 2.1 may do this without end.
LEAVE = """
import ctypes, torch
from bootfile.ground import errors
from common.distributed import leaving, process_group
from common.ground import endings
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.distributed.destroy_process_group = lambda: ctypes.PyDLL(None).sleep(1000)
leaving.leave_group(None, None)
"""


def test_a_process_leaves_a_gloo_group_without_waiting():
    run("-c", LEAVE)


# Each process ends as the text that it reads from its FIFO says: an exit code, or minus a signal.
ENDS = textwrap.dedent(f"""
    import os, sys
    sys.path.insert(0, {str(ROOT)!r})
    from common.distributed import launcher
    from common.platform.topology import Topology
    launcher.GRACE = 400
    if "RANK" not in os.environ:
        sys.exit(launcher.start(Topology(0, 1, 2, None, None, None, "node", "plain"), 1.0))
    with open(sys.argv[1] + os.environ["RANK"]) as fifo:
        end = int(fifo.read())
    os.kill(os.getpid(), -end) if end < 0 else os._exit(end)
""")


def _state(pid):
    """Return the state of a process, "Z" when it has ended, "" when its parent has read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.thorough
@pytest.mark.parametrize("seen", [pytest.param("one by one", marks=pytest.mark.thorough), "together"])
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([(0, 5), (1, -signal.SIGKILL)], 137),
        ([(0, -signal.SIGABRT), (1, -signal.SIGKILL)], 137),
        ([(0, 5), (1, 1)], 1),
        ([(0, 5), (1, 0)], 5),
    ],
)
def test_the_exit_code_is_that_of_the_cause(ends, code, seen, tmp_path):
    """The process that only lost contact may end before the killed one, or both before the parent looks."""
    for rank in range(2):
        os.mkfifo(tmp_path / str(rank))
    job = start("-c", ENDS, f"{tmp_path}/")
    wait_until(lambda: len(processes_of(job)) == 2, job)
    pids = processes_of(job)
    if seen == "together":
        job.send_signal(signal.SIGSTOP)
        wait_until(lambda: _state(job.pid) == "T", job)
    for rank, end in ends:
        (tmp_path / str(rank)).write_text(str(end))  # it waits until the process reads
        if (rank, end) != ends[-1] or seen == "together":
            wait_until(lambda rank=rank: _state(pids[rank]) == ("Z" if seen == "together" else ""), job)
    job.send_signal(signal.SIGCONT)
    errors = finish(job, code).stderr
    assert ("was killed by SIGKILL" in errors) == (code == 137)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_the_processes_can_handle_it_has_its_usual_code(number, code, tmp_path):
    for rank in range(2):
        os.mkfifo(tmp_path / str(rank))
    job = start("-c", ENDS, f"{tmp_path}/")
    wait_until(lambda: len(processes_of(job)) == 2, job)
    job.send_signal(number)
    finish(job, code)


def test_a_launcher_in_the_parent_process_gets_what_main_returns(tmp_path):
    """torchrun --run-path calls the script in processes of multiprocessing, and waits until they return."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--run-path")
    options = (*QUICK, "--max_steps=1", "--batch_size=16", f"--output_dir={tmp_path}")
    assert "test_accuracy=" in run(*start, ROOT / "jobs" / "train_ddp.py", *options, timeout=100).stdout


def test_a_second_job_in_one_process(tmp_path):
    """As two cells with %run in one notebook."""
    script = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
for _ in range(2):
    runpy.run_module("jobs.train_ddp", run_name="__main__")
"""
    printed = run("-c", script, *QUICK, "--max_steps=1", "--batch_size=16", cwd=tmp_path).stdout
    assert printed.count("test_accuracy=") == 2


@pytest.mark.thorough
def test_a_process_group_of_the_user_is_not_destroyed(tmp_path):
    (tmp_path / "own.py").write_text(f"""
import runpy, sys, torch.distributed
sys.path.insert(0, {str(ROOT)!r})
torch.distributed.init_process_group("gloo")
runpy.run_module("jobs.train_ddp", run_name="__main__")
""")
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "own.py")
    errors = run(*start, *QUICK, f"--output_dir={tmp_path / 'out'}", cwd=tmp_path, code=1).stderr
    assert re.search("^error: .*process group of 2 ", errors, re.MULTILINE)
    assert not (tmp_path / "out").exists()
