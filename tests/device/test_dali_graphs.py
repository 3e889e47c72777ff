"""DALI accepts the graphs of its GPU engines. build() is not called, because it needs a driver."""

import types

import pytest
import torch

from datasets.loaders.engines.dali import Dali, PairedDali

dali = pytest.importorskip("nvidia.dali", reason="DALI is not installed")

STORES = [
    (Dali, types.SimpleNamespace(form="encoded")),
    (Dali, types.SimpleNamespace(form="decoded")),
    (PairedDali, types.SimpleNamespace(index=types.SimpleNamespace(rows=0))),
    (PairedDali, types.SimpleNamespace(index=types.SimpleNamespace(rows=100))),
]


def _graph(monkeypatch, kind, store, index=0):
    """Return (outputs, the specifications of all operators) of the graph for a GPU."""
    outputs = []
    monkeypatch.setattr(dali.Pipeline, "set_outputs", lambda _, *found: outputs.extend(found))
    monkeypatch.setattr(dali.Pipeline, "build", lambda _: None)
    engine = object.__new__(kind)  # no threads
    engine.store, engine.device, engine.interpolation, engine.workers = (
        store,
        torch.device("cuda", index),
        "bilinear",
        2,
    )
    engine._pipeline = None
    assert engine._built(types.SimpleNamespace(size=96, largest=64)).device_id == index
    found, todo = {}, [*outputs]
    while todo:
        operator = todo.pop().source
        if id(operator) not in found:
            found[id(operator)] = str(operator.spec)
            todo += operator.inputs
    return outputs, list(found.values())


@pytest.mark.parametrize("kind, store", STORES)
def test_images_come_out_on_the_gpu_and_chroma_is_interpolated(kind, store, monkeypatch):
    outputs, specs = _graph(monkeypatch, kind, store, index=1)
    assert [each.device for each in outputs] == ["gpu", "cpu"]
    decoders = [spec for spec in specs if "_module: nvidia.dali.fn.decoders" in spec]
    assert len(decoders) == (getattr(store, "form", "encoded") == "encoded")
    for spec in decoders:
        assert "device: mixed" in spec and "jpeg_fancy_upsampling: True" in spec


def test_an_argument_that_dali_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr("datasets.loaders.engines.dali.NVJPEG", {"device": "mixed", "fancy": True})
    with pytest.raises(Exception, match="fancy"):
        _graph(monkeypatch, *STORES[0])


def test_an_error_before_the_first_batch_stays_as_it_is():
    engine = object.__new__(Dali)  # no threads
    engine._in_flight = []
    error = RuntimeError("no memory")
    assert engine._name_bad_file(error) is error
