"""common/distributed/process_group.py by itself: how a process leaves its group."""

from tests.conftest import run

# Holds the interpreter's lock while it waits, as gloo's destructor in torch 2.1 may do for ever.
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
