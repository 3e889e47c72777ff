"""`python -m launch export` writes a network only if its logits equal those of the original."""

import json

import pytest
import torch

from bootfile.ground.errors import BadInput
from launch.inference import export
from launch.inference.trained import load


def _export(weights, target) -> str:
    export.main([str(weights), "--to", str(target)])
    return str(target)


def _batch(network) -> torch.Tensor:
    return torch.randn(7, network.channels, network.size, network.size)


@pytest.mark.thorough
def test_onnx(digits, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    network = load(str(digits))
    batch, path = _batch(network), _export(digits, tmp_path / "model.onnx")
    found = runtime.InferenceSession(path).run(None, {"images": batch.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), network.model(batch), rtol=1e-4, atol=1e-4)
    facts = {each.key: each.value for each in onnx.load(path).metadata_props}
    assert json.loads(facts[export.NOTE])["classes"] == [*map(str, range(10))]


def test_torch_export(digits, tmp_path):
    if not hasattr(torch.export, "Dim"):
        pytest.skip("torch.export has no Dim before torch 2.2")
    network, note = load(str(digits)), {export.NOTE: ""}
    batch, path = _batch(network), _export(digits, tmp_path / "model.pt2")
    loaded = torch.export.load(path, extra_files=note).module()
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch), network.model(batch), rtol=1e-4, atol=1e-4)
    assert json.loads(note[export.NOTE])["size"] == 8


def test_other_logits_are_not_written(digits, tmp_path, monkeypatch):
    def wrong(network, *_):
        return b"content", lambda images: network.model(images) * 1.001

    monkeypatch.setitem(export.FORMS, ".pt2", wrong)
    with pytest.raises(BadInput, match=r"not written: .*logits differ .*0\.00"):
        _export(digits, tmp_path / "model.pt2")
    with pytest.raises(BadInput, match="none is not a folder in which"):
        _export(digits, tmp_path / "none" / "model.pt2")
    with pytest.raises(BadInput, match=r"expected .*\.onnx, \.pt2"):
        _export(digits, tmp_path / "model.ts")
    (tmp_path / "mine.pt2").write_text("mine")
    with pytest.raises(BadInput, match="exists"):
        _export(digits, tmp_path / "mine.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.pt2"]
