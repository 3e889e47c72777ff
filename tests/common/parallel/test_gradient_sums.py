"""A sum of the gradients of a shard: one other bit is another sum, however the gradients are stored."""

from types import SimpleNamespace

import pytest
import torch

from bootfile.processes import ranks
from common.parallel.recheck import Recheck, sum_bits


def parts_of(folder, said):
    """Return what a plugin reads of a run whose results are in a folder."""
    saver = SimpleNamespace(folder=str(folder))
    return SimpleNamespace(saver=saver, say_once=lambda line, subject: said.append(line), writes=True)


def find_sum(*gradients) -> int:
    value = sum_bits(gradients, torch.device("cpu"))
    assert value.dtype == torch.float64
    return int(value)


def make_sums() -> Recheck:
    """Return the plugin with the sums of all shards of some steps."""
    forward = torch.nn.Linear(1, 1)
    forward.module = torch.nn.Linear(1, 1)
    recheck = Recheck(SimpleNamespace(), forward, 100, print)
    recheck._steps = {1: [2**47, 3]}
    return recheck


@pytest.mark.parametrize(
    "kind, bits", [(torch.float32, torch.int32), (torch.float64, torch.int64), (torch.bfloat16, torch.int16)]
)
def test_each_bit_counts(kind, bits):
    torch.manual_seed(0)
    first = torch.randn(3, 5, dtype=kind)
    second = torch.randn(7, dtype=kind)
    seen = {find_sum(first, second)}
    one = torch.ones(1, dtype=bits)
    for bit in range(8 * first.element_size()):
        flipped = first.clone()
        flipped[1, 2] = (flipped[1, 2].view(1).view(bits) ^ (one << bit)).view(kind)[0]
        seen.add(find_sum(flipped, second))
    assert len(seen) == 1 + 8 * first.element_size()


def test_the_order_in_memory_does_not_count_and_that_of_the_gradients_does():
    first = torch.randn(4, 3, 2, 2)
    second = torch.randn(4, 3, 2, 2)
    expected = find_sum(first, second)
    assert 0 <= expected < 2**48
    assert find_sum(first.contiguous(memory_format=torch.channels_last), second) == expected
    assert find_sum(second, first) != expected


def test_only_the_first_rank_writes(tmp_path, monkeypatch):
    said = []
    for keeps in (False, True):
        monkeypatch.setattr(ranks, "rank", lambda keeps=keeps: 0 if keeps else 1)
        sums = make_sums()
        sums.begin(parts_of(tmp_path, said), 0)
        sums.write()
        sums.write()  # nothing new
        path = tmp_path / "shards.jsonl"
        assert path.exists() == keeps
    assert path.read_text() == '{"step": 1, "shards": [140737488355328, 3]}\n'
    assert not said


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "shards.jsonl").mkdir()
    sums = make_sums()
    said = []
    sums.begin(parts_of(tmp_path, said), 0)
    sums.write()
    assert len(said) == 1 and said[0].startswith("warning: shards.jsonl lacks steps: ")
