"""The saver copies into reused memory, has one write in flight, and reports errors."""

import threading

import pytest
import torch

from common.checkpoint.saver import BackgroundWriter, is_finite, size_of


def test_training_goes_on_while_a_copy_is_written():
    writer, go, seen = BackgroundWriter(), threading.Event(), []
    weight = torch.zeros(4)

    def write(copy):
        go.wait(10)
        seen.append(copy["weight"].tolist())

    writer.submit({"weight": weight, "step": 1}, write)
    weight += 1  # the optimizer does not wait
    assert not writer.idle() and not seen
    go.set()
    assert writer.wait() is None and seen == [[0.0] * 4] and writer.idle()


def test_memory_is_used_again():
    writer, seen = BackgroundWriter(), []
    weight = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        writer.submit({"a": [weight, (weight,)]}, lambda copy: seen.append(copy["a"][0]))
        writer.wait()
    assert seen[0].data_ptr() == seen[1].data_ptr() != weight.data_ptr()
    assert seen[0].stride() == weight.stride() and torch.equal(seen[0], weight)


def test_an_error_comes_out_once():
    writer = BackgroundWriter()

    def fail(copy):
        raise OSError(28, "No space left on device")

    writer.submit({}, fail)
    assert str(writer.wait()) == "[Errno 28] No space left on device" and writer.wait() is None
    writer.submit({}, fail)
    with pytest.raises(OSError, match="No space left"):
        writer.submit({}, print)


def test_sizes_and_finiteness():
    state = {"a": torch.zeros(10), "b": [torch.zeros(3, dtype=torch.int64), 5], "c": (torch.ones(2),)}
    assert size_of(state) == 40 + 24 + 8 and is_finite(state)
    assert not is_finite({"a": [torch.tensor([0.0, float("nan")])]})
    assert not is_finite({"a": {"b": torch.tensor(float("inf"))}})
