"""Values that ranks send to each other run no code when they are read."""

import os
import pickle

import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.processes import messages, ranks
from tests.conftest import run_ranks

JOB = """
import os, sys, torch
sys.path.insert(0, ".")
from bootfile.ground.errors import BadInput, Unavailable
from bootfile.processes import messages, ranks
torch.distributed.init_process_group("gloo")
rank = ranks.rank()
gathered = ranks.gather_objects({"a": (rank, rank * "long")})
def refuse():
    raise Unavailable("no answer")


try:
    ranks.call_on_first(refuse)
except BadInput as error:
    assert (str(error), error.code) == ("no answer", Unavailable.code)
print([gathered, ranks.broadcast_object({1: (rank, torch.ones(1))})])
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # without it, torch 2.1 may abort when Python ends
"""


def test_values_keep_their_types_and_errors_their_codes():
    expected = [[{"a": (0, "")}, {"a": (1, "long")}], {1: (0, torch.ones(1))}]
    assert [job.stdout for job in run_ranks("-c", JOB)] == [f"{expected}\n"] * 2


def test_a_pickle_of_another_program_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    data = torch.frombuffer(bytearray(pickle.dumps(Attack(), 2)), dtype=torch.uint8)
    with pytest.raises(BadInput, match=r"sent a value .*cannot be read"):
        messages._decode(data)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "kind, bits, most",
    [(torch.float32, torch.int32, 2), (torch.float64, torch.int64, 2), (torch.bfloat16, torch.int16, 20)],
)
def test_a_digest_notices_a_flipped_bit(kind, bits, most):
    """The highest 12 bits of 500 numbers, one by one. A sign may be missed: one in 2^16 of float32."""
    torch.manual_seed(0)
    values = torch.randn(500, 1, dtype=kind)
    before = torch.stack([ranks.digest(value) for value in values])
    one = torch.ones(1, dtype=bits)
    width = 8 * values.element_size()
    for bit in range(width - 12, width):
        flipped = (values.view(bits) ^ (one << bit)).view(kind)
        after = torch.stack([ranks.digest(value) for value in flipped])
        assert int((before == after).sum()) <= most, bit


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_digest_notices_two_changes_that_cancel_in_a_sum(kind):
    torch.manual_seed(0)
    values = torch.randn(200, dtype=kind)
    signs = values.clone()
    signs[[3, 7]] *= -1  # their bits, as integers, have the same sum
    exchanged = values.double().clone()
    exchanged[3] += 1
    exchanged[7] -= 1
    moved = torch.tensor([1, 2], dtype=torch.int64)
    assert ranks.digest(signs) != ranks.digest(values)
    assert ranks.digest(exchanged.to(kind)) != ranks.digest(values)
    assert ranks.digest(moved << 40) != ranks.digest(torch.tensor([0, 3]) << 40)


@pytest.mark.parametrize("values", [["a", "a", "b"], ["a", "b", "a"]])
def test_a_rank_with_another_value_is_named(values, monkeypatch):
    monkeypatch.setattr(ranks, "gather_objects", lambda value: ["a", "a", "a"])
    ranks.assert_equal_across_ranks("data", "a")
    monkeypatch.setattr(ranks, "gather_objects", lambda value: values)
    with pytest.raises(BadInput, match=f"data: rank 0 has a, rank {values.index('b')} has b"):
        ranks.assert_equal_across_ranks("data", "a")
