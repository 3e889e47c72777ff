"""The digest of a state: equal bits have equal digests, however their tensors are stored and divided."""

import itertools
import random
import struct

import pytest
import torch

from bootfile.exact import digest
from bootfile.processes import ranks
from tests.conftest import CAN_FORK, run_ranks

_ALL = 2**64 - 1


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _ALL
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _ALL
    return word ^ (word >> 31)


def _sum(content: bytes) -> int:
    """Return digest.add_bytes() as its definition has it, word by word."""
    added = 0
    for place, (word,) in enumerate(struct.iter_unpack("<q", content + bytes(-len(content) % 8))):
        block, at = divmod(place, 2**13)
        low, high, factor = (_mix(each) | 1 for each in (2 * at, 2 * at + 1, 2**14 + block))
        added += (word * low + (word >> 32) * high) * factor
    return added & _ALL


def _of(weight: object, **others: object) -> str:
    return digest.summarize(1, {"model": {"weight": weight} | others})["digest"]


def test_the_sum_of_bytes_is_that_of_its_definition_wherever_they_are_cut():
    draw, content = random.Random(0), random.Random(1).randbytes(5 * 2**16 + 4321)
    whole, expected = torch.frombuffer(bytearray(content), dtype=torch.uint8), _sum(content)
    assert int(digest.add_bytes(whole)) & _ALL == expected == int(digest.add_bytes(whole.numpy())) & _ALL
    for _ in range(50):
        cuts = [0, *sorted(draw.sample(range(len(content)), 4)), len(content)]
        parts = [int(digest.add_bytes(whole[a:b], a)) for a, b in itertools.pairwise(cuts)]
        assert sum(parts) & _ALL == expected
    assert int(digest.add_bytes(whole[:0], 7)) == 0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool], ids=str
)
def test_each_type_each_place_and_each_bit_count(dtype):
    weight = torch.tensor(random.Random(2).choices((0, 1), k=105)).view(3, 5, 7, 1).to(dtype)
    whole = _of(weight)
    assert _of(weight.to(memory_format=torch.channels_last)) == whole
    assert _of(weight.transpose(0, 2).contiguous().transpose(0, 2)) == whole
    others = {"dtype": weight.real.to(torch.int16), "shape": weight.view(5, 3, 7, 1), "name": None}
    others |= {"permuted": weight.flip(1), "moved": weight.roll(1), "shorter": weight[:, :, :-1]}
    for place in (0, 1, 52, 104):
        others[f"changed at {place}"] = weight.clone()
        others[f"changed at {place}"].view(-1)[place] = 1 - weight.view(-1)[place].real.to(torch.float32)
    digests = {name: _of(other) for name, other in others.items()}
    assert whole not in digests.values() and len(set(digests.values())) == len(others)


def test_views_that_are_computed_when_they_are_read_have_the_digest_of_their_values():
    weight = torch.randn(3, 4, dtype=torch.complex64)
    for view in (weight.conj(), weight.conj().T, weight.conj()[0, 0], weight.conj().imag):
        values = view.resolve_conj().resolve_neg().clone()
        assert _of(view) == _of(values) and ranks.digest(view) == ranks.digest(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_signs_and_bits_of_nan_count_and_do_not_cancel(dtype):
    zero = torch.zeros(2**15, dtype=dtype)
    digests = {_of(zero)}
    for first, second in ((0, 1), (0, 2), (1, 3), (5, 2**14 + 5), (7, 2**15 - 1)):
        other = zero.clone()
        other[[first, second]] = -0.0
        digests.add(_of(other))
    assert len(digests) == 6
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[zero.element_size()]
    nan = torch.full((4,), torch.nan, dtype=dtype)
    other = nan.clone()
    other.view(integer)[2] ^= 1
    assert other.isnan().all() and _of(other) != _of(nan)


def test_tensors_and_values_that_are_exchanged_are_another_state():
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    states = _of(one, other=two), _of(two, other=one), _of(one, other=one), _of(one), _of([1.0, 2.0])
    assert len(set(states)) == 5
    assert _of(torch.zeros(0)) != _of(torch.zeros(0, 2)) != _of(torch.zeros(2, 0))
    assert _of(torch.eye(3).to_sparse()) == _of(torch.eye(3))


JOB = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from bootfile.processes import ranks
from bootfile.exact import digest
from bootfile.processes import ranks
from bootfile.exact import dtensors

dist.init_process_group("gloo")
torch.manual_seed(0)
shapes = (7, 3), (2, 5), (5,), (64, 33, 31), (9, 1001), (0, 4)
state = {f"{shape} {dtype}": torch.randn(shape).to(dtype) for shape in shapes
         for dtype in (torch.float32, torch.bfloat16)} | {"count": torch.tensor(7), "name": "x"}
expected = digest.summarize(3, {"model": state})
gathered, sent, full, reduce = [], [], dtensors.full, dist.all_reduce
dtensors.full = lambda each: gathered.append(each) or full(each)
dist.all_reduce = lambda each: sent.append(each.numel()) or reduce(each)
for sizes, places in (
    ((4,), [Shard(0)]), ((2, 2), [Shard(0), Replicate()]), ((2, 2), [Replicate(), Shard(0)]),
    ((4,), [Shard(1)]), ((4,), [Replicate()]),
):
    mesh = init_device_mesh("cpu", sizes)
    own = [each if each != Shard(1) else Shard(0) for each in places]
    parts = {name: distribute_tensor(each, mesh, places if each.ndim > 1 else own)
             if isinstance(each, torch.Tensor) and each.ndim else each for name, each in state.items()}
    line = digest.summarize(3, {"model": parts})
    print(line == expected or ranks.rank() > 0, len(gathered), sent)
    gathered.clear(), sent.clear()
"""


@pytest.mark.skipif(not CAN_FORK, reason="sharded states need torch 2.6, too")
def test_ranks_add_their_own_parts_and_no_rank_gathers_a_tensor():
    """The digest of 4 and 2 parts is that of one process. One all_reduce has a number for each tensor. Only
    tensors that are not sharded in their first dimension, or not at all, are gathered."""
    for job in run_ranks("-c", JOB, ranks=4):
        assert job.stdout.splitlines() == ["True 0 [13]"] * 3 + ["True 10 [13]", "True 12 [13]"]


def test_a_state_has_the_digest_that_earlier_versions_have_recorded():
    """A restart would refuse the checkpoints of a run that an earlier version began, if their digests were
    others. A change of the digest needs a new digest.FORMAT: states of another format are not compared."""
    step = {"step": torch.tensor(3.0), "exp_avg": torch.arange(3.0)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "fused": True, "params": [0]}]
    objects = {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: step}, "param_groups": groups, "class": "Adam"},
        "scaler": {"scale": 1024.0, "_growth_tracker": 3},
        "receipt": {"digest": "00", "step": 3},
    }
    assert digest.FORMAT == 2 and digest.summarize(3, objects)["digest"] == "9d52dafcc8fd612f"
