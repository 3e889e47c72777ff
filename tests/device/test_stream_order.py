"""Memory is reused only after the event that frees it, and read only after the event that follows the write.

The loaders run on substitutes of streams and events (tests/support/fake_gpu.py).
"""

import types

import pytest
import torch

from bootfile.exact.background import HostCopies
from bootfile.loaders.loader import Loader
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.loaders.backends import SyntheticIndex
from datasets.loaders.engines.crops import Threads
from datasets.loaders.image_loader import ImageLoader, ToDevice
from tests.support import fake_gpu

pytestmark = pytest.mark.skipif(torch.__version__ < "2.11", reason="the stand-ins are for torch 2.11")
SIZE, BATCHES = 8, 9


class _Ring(Threads):
    """The engine `threads`, whose tasks fill memory immediately."""

    def __init__(self, recorder):
        super().__init__(types.SimpleNamespace(is_remote=False), workers=1)
        self.recorder = recorder

    def _memory(self, count, size):
        ring = super()._memory(count, size)
        self.recorder.pinned |= {self.recorder.number(each) for each in ring}
        return ring

    def _submit(self, filled):
        self.recorder.write_on_host(filled[1])
        return []


class _OnGpu:
    """An engine with one buffer on the GPU, like DALI. The host waits until it is filled, and frees it at
    the end."""

    reuses_memory = True

    def __init__(self, recorder):
        self.recorder, self.stream = recorder, fake_gpu.Stream()

    def run(self, plan):
        with torch.cuda.stream(self.stream):
            buffer = torch.zeros((plan.largest, SIZE, SIZE, 3), dtype=torch.uint8, device="cuda")
        try:
            for batch in plan:
                self._use(buffer)
                yield batch, buffer[: len(batch.ids)]
        finally:
            self._use(buffer)

    def _use(self, buffer):
        with torch.cuda.stream(self.stream):
            buffer.fill_(1)
        self.recorder.host |= self.stream.clock

    def close(self):
        pass


class _Gathered:
    """An engine that computes on the training's stream, like `resident`, with new memory for each batch."""

    reuses_memory = False

    def __init__(self, recorder):
        pass

    def run(self, plan):
        for batch in plan:
            yield batch, torch.zeros((len(batch.ids), SIZE, SIZE, 3), dtype=torch.uint8, device="cuda")

    def close(self):
        pass


class _Nested(_Gathered):
    """An engine for any Dataset, with new pinned memory for each batch."""

    def run(self, plan):
        for batch in plan:
            yield batch, (torch.zeros(len(batch.ids), 5).pin_memory(), {"y": torch.zeros(3).pin_memory()})


def _train(recorder, engine, steps=None):
    """Iterate over an epoch, completely or for some steps, and then over another one."""
    index = SyntheticIndex(BATCHES * 16, "train", 10)
    plan = Plan(index, BatchSampler(len(index), 16, 0), None, SIZE)
    kind = Loader if engine is _Nested else ImageLoader
    weights = torch.zeros(1, device="cuda")
    with kind(engine(recorder), plan, fake_gpu.DEVICE) as loader:
        for epoch in range(2):
            loader.seek(epoch * BATCHES)
            for step, (images, labels) in enumerate(loader, start=1):
                weights += images.sum() + (labels["y"] if isinstance(labels, dict) else labels).sum()
                recorder.end_step()
                if step == steps:
                    break
    return recorder.races


@pytest.mark.parametrize("steps", [None, 1, 3])
@pytest.mark.parametrize("engine", [_Ring, _OnGpu, _Gathered, _Nested])
def test_memory_is_used_in_order(engine, steps, monkeypatch):
    with fake_gpu.fake_gpu(monkeypatch) as recorder:
        assert not _train(recorder, engine, steps)
    assert recorder.steps == 2 * (steps or BATCHES)


FAULTS = {  # omitted call -> race that is found
    "wait": (ToDevice, lambda self: None, {_Ring: "the host writes", _OnGpu: "a stream writes"}),
    "wait_event": (
        fake_gpu.Stream,
        lambda *_: None,
        dict.fromkeys((_Ring, _Gathered, _Nested), "stream reads"),
    ),
    "wait_stream": (fake_gpu.Stream, lambda *_: None, {_Gathered: "stream reads"}),
    "record_stream": (
        fake_gpu.Recorder,
        lambda *_: None,
        dict.fromkeys((_Ring, _Gathered, _Nested), "freed"),
    ),
}


@pytest.mark.parametrize(
    "fault, engine", [(fault, engine) for fault, (*_, engines) in FAULTS.items() for engine in engines]
)
def test_an_order_that_is_missing_is_found(fault, engine, monkeypatch):
    place, nothing, found = FAULTS[fault]
    monkeypatch.setattr(place, fault, nothing)
    with fake_gpu.fake_gpu(monkeypatch) as recorder:
        races = _train(recorder, engine)
    assert races and all(found[engine] in each for each in races)


def test_the_next_batch_is_copied_while_one_is_used(monkeypatch):
    with fake_gpu.fake_gpu(monkeypatch) as recorder:
        index, begun = SyntheticIndex(BATCHES * 16, "train", 10), []
        loader = ImageLoader(
            _Ring(recorder), Plan(index, BatchSampler(len(index), 16, 0), None, SIZE), fake_gpu.DEVICE
        )
        begin = loader.to_device.begin
        loader.to_device.begin = lambda *batch: begun.append(len(recorder.launches)) or begin(*batch)
        loader.seek(0)
        next(iter(loader))
        assert len(begun) == 2
        first = [func.overloadpacket.__name__ for func in recorder.launches[begun[0] : begun[1]]]
        assert first == ["_to_copy", "_to_copy", "sub", "mul_"]  # the images are read once as uint8


def test_a_save_waits_for_its_copies_in_one_pinned_block(monkeypatch):
    with fake_gpu.fake_gpu(monkeypatch) as recorder:
        weights = [torch.zeros(9, 3, 3, 3, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")]
        copies = HostCopies()
        for _ in range(2):
            weights[0].add_(1)
            state = copies.make({"model": {"a": weights[0], "b": [weights[1]]}})
            recorder.read_on_host(state["model"]["a"])
            recorder.read_on_host(state["model"]["b"][0])
        assert not recorder.races and len(recorder.blocks) == 1
        assert {text.partition(":")[0] for _, text in recorder.waits} == {"synchronize() of a stream"}
