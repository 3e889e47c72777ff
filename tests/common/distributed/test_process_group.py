"""process_group.py chooses the right backend and ends a group."""

import inspect
import textwrap
import threading

import pytest
import torch

from common import exits
from common.distributed import process_group
from tests.conftest import ROOT, run

# A process sees one GPU: its own, or one for all. The UUID shows it; before torch 2.4, CUDA_VISIBLE_DEVICES.
MEET = textwrap.dedent(f"""
    import argparse, os, sys
    from types import SimpleNamespace
    import torch
    sys.path.insert(0, {str(ROOT)!r})
    from common.distributed import devices, launcher, process_group
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    uuid, visible = (text.format(os.environ.get("LOCAL_RANK")) for text in sys.argv[1:3])
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(**{{"uuid": uuid}} if uuid else {{}})
    parser = argparse.ArgumentParser()
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


@pytest.mark.parametrize(
    ("uuid", "visible", "backend"),
    [
        ("GPU-{}", "", "nccl cuda:0"),
        ("GPU-0", "{}", "gloo None"),
        ("", "{}", "nccl cuda:0"),
        ("", "", "gloo None"),
    ],
)
def test_a_launcher_may_show_each_process_its_own_gpu_only(uuid, visible, backend):
    done = run("-c", MEET, uuid, visible)
    if "device_id" not in inspect.signature(torch.distributed.init_process_group).parameters:
        backend = f"{backend.split()[0]} None"  # torch before 2.3
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {backend}" for rank in range(2)]


def test_an_nccl_group_is_left_on_the_own_gpu(monkeypatch):
    did = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.append((threading.get_ident(), device)))
    ending = lambda: did.append((threading.get_ident(), "left"))  # noqa: E731
    monkeypatch.setattr(torch.distributed, "destroy_process_group", ending)
    monkeypatch.setattr(exits, "leave", did.append)
    process_group._leave_group()
    (first, device), (second, left), code = did
    assert (device, left, code) == (3, "left", 0) and first == second != threading.get_ident()


# Holds the interpreter's lock while it waits. Gloo's destructor in torch 2.1 may do this without end.
LEAVE = """
import ctypes, torch
from common.distributed import process_group
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.distributed.destroy_process_group = lambda: ctypes.PyDLL(None).sleep(1000)
process_group._leave_group()
"""


def test_a_process_leaves_a_gloo_group_without_waiting():
    run("-c", LEAVE, timeout=60)
