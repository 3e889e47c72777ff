"""Values that ranks send to each other run no code when they are read."""

import os
import pickle

import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from tests.conftest import environment, finish, free_port, start

JOB = """
import os, sys, torch
sys.path.insert(0, ".")
from bootfile.processes import ranks
torch.distributed.init_process_group("gloo")
rank = ranks.rank()
gathered = ranks.gather_objects({"a": (rank, rank * "long")})
print([gathered, ranks.broadcast_object({1: (rank, torch.ones(1))})])
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # without it, torch 2.1 may abort when Python ends
"""


def test_values_keep_their_types():
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    jobs = [start("-c", JOB, env=environment(**shared, RANK=str(rank))) for rank in range(2)]
    expected = [[{"a": (0, "")}, {"a": (1, "long")}], {1: (0, torch.ones(1))}]
    assert [finish(job).stdout for job in jobs] == [f"{expected}\n"] * 2


def test_a_pickle_of_another_program_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    data = torch.frombuffer(bytearray(pickle.dumps(Attack(), 2)), dtype=torch.uint8)
    with pytest.raises(BadInput, match="a process sent a value that cannot be read"):
        ranks._decode(data)
    assert not (tmp_path / "made").exists()
