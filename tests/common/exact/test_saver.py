"""The saver copies into reused memory, has one write in flight, and reports errors."""

import errno
import os
import threading

import pytest
import torch

from common.exact.saver import HostCopies, Saver, find_infinite, size_of


def test_training_goes_on_while_a_copy_is_written(tmp_path):
    saver, go, seen = Saver(str(tmp_path), 1, print), threading.Event(), []
    weight = torch.zeros(4)

    def write(copy):
        go.wait(10)
        seen.append(copy["weight"].tolist())

    saver._submit("best.pth", lambda: {"weight": weight}, write)
    weight += 1  # the optimizer does not wait
    saver.collect()
    assert not seen
    go.set()
    assert saver.finish() == [] and seen == [[0.0] * 4]


def test_memory_is_used_again():
    copies = HostCopies()
    weight = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    first, second = (copies.make({"a": [weight, (weight,)]})["a"][0] for _ in range(2))
    assert first.data_ptr() == second.data_ptr() != weight.data_ptr()
    assert first.stride() == weight.stride() and torch.equal(first, weight)


def test_an_error_is_reported_once_and_forgotten_after_a_success(tmp_path):
    lines: list[str] = []
    saver = Saver(str(tmp_path), 1, lines.append)

    def fail(copy):
        raise OSError(28, "No space left on device")

    saver._submit("best.pth", dict, fail)
    (reason,) = saver.finish()
    assert reason.startswith("best.pth was not saved: No space left on device (") and len(lines) == 1
    saver._submit("best.pth", dict, lambda copy: None)
    assert saver.finish() == [] and len(lines) == 1


@pytest.mark.parametrize(
    ("reason", "durable", "is_hopeless"),
    [(errno.EROFS, 0, True), (errno.EROFS, 4, False), (errno.ENOSPC, 0, False)],
)
def test_a_file_system_that_takes_no_checkpoint_at_all(tmp_path, reason, durable, is_hopeless):
    """A full disk may have space again, and a run with checkpoints keeps them."""
    saver = Saver(str(tmp_path), 1, lambda line: None)
    saver.durable = durable

    def fail(copy):
        raise OSError(reason, os.strerror(reason))

    for _ in range(3):
        assert not saver.hopeless
        saver._submit("step_8.pt", dict, fail)
        saver.collect(wait=True)
    assert bool(saver.hopeless) == is_hopeless


def test_sizes_and_finiteness():
    state = {"a": torch.zeros(10), "b": [torch.zeros(3, dtype=torch.int64), 5], "c": (torch.ones(2),)}
    assert size_of(state) == 40 + 24 + 8
    tensors = {"a": torch.tensor([0.0, float("nan")]), "b": torch.tensor(float("inf")), "c": torch.ones(2)}
    assert find_infinite(tensors | {"extra": [1]}) == {"a", "b"}
