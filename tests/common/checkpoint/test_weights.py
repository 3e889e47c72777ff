"""Files of weights load if they fit, are reported if they fit in part, and are refused otherwise."""

import io
import json
import os
import pickle
import zipfile

import pytest
import torch
from torch import nn

from common.checkpoint import files as checkpoint
from common.checkpoint import weights
from common.compute.models import resnet18
from common.ground.exits import BadInput
from common.run import starts
from common.run.metrics import CLASSES
from tests.support.hostile_pickle import Hostile


def _model(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, classes))


def _same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _prefixed(prefix: str):
    return lambda state: {f"{prefix}{name}": tensor for name, tensor in state.items()}


FORMS = {
    "best.pth": dict,
    "DistributedDataParallel": _prefixed("module."),
    "torch.compile": _prefixed("_orig_mod."),
    "both": _prefixed("module._orig_mod."),
    "averaged": lambda state: {"n_averaged": torch.tensor(3)} | _prefixed("module.")(state),
    "before BatchNorm counted": lambda state: {
        name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")
    },
    "step_4.pt": lambda state: {"format": 2, "step": 4, "objects": {"model": state, "optimizer": {}}},
    "step_4.pt with --ema": lambda state: {
        "step": 4,
        "objects": {"model": _model().state_dict(), "ema": FORMS["averaged"](state)},
    },
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "into a wrapper"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path, form, wrapped):
    path, model, source = str(tmp_path / "file.pt"), _model(), _model()
    checkpoint.write(path, FORMS[form](source.state_dict()))
    line = weights.load(path, _Wrapped(model) if wrapped else model, True)
    counted = 10 if form == "before BatchNorm counted" else 11
    assert line == f"weights from {path}: {counted} of 11 tensors"
    assert _same(model.state_dict(), source.state_dict())


class _Wrapped(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


class _Block(nn.Module):
    """A block of the sample that ModelArts publishes for distributed training on CIFAR-10."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.residual_function = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return nn.ReLU(True)(self.residual_function(x) + self.shortcut(x))


class _Sample(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)
        )
        self.conv2 = nn.Sequential(_Block(64, 64), _Block(64, 64))
        self.conv3 = nn.Sequential(_Block(64, 128, 2), _Block(128, 128))
        self.conv4 = nn.Sequential(_Block(128, 256, 2), _Block(256, 256))
        self.conv5 = nn.Sequential(_Block(256, 512, 2), _Block(512, 512))
        self.avg_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.dense_layer = nn.Linear(512, 10)

    def forward(self, x):
        x = self.conv5(self.conv4(self.conv3(self.conv2(self.conv1(x)))))
        return self.dense_layer(self.avg_pool(x).flatten(1))


def test_a_file_of_the_modelarts_sample(tmp_path):
    sample, model = _Sample(), resnet18()
    torch.save(_prefixed("module.")(sample.state_dict()), tmp_path / "epoch_1.pth")
    line = weights.load(str(tmp_path / "epoch_1.pth"), model, complete=True)
    assert line.endswith(": 122 of 122 tensors")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), sample.eval()(images), rtol=1e-4, atol=1e-4)


def test_another_head_is_reported_and_left_as_it_is(tmp_path):
    path, source, model = str(tmp_path / "best.pth"), _model(classes=9), _model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(source.state_dict() | {"aux.weight": torch.zeros(2)}, path)
    with pytest.raises(BadInput, match=r"9 of 11 tensors; .* shape: 3.weight \[9, 8\] in the file, \[4"):
        weights.load(path, model, complete=True)
    assert _same(model.state_dict(), before)
    line = weights.load(path, model)
    assert "; different shape: 3.weight [9, 8] in the file, [4, 8] in the model, 3.bias [9]" in line
    assert "not in the model: aux.weight" in line
    head = {"3.weight", "3.bias"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name in head else source.state_dict()[name]), name


def test_weights_of_another_network_are_refused(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    path = str(tmp_path / "best.pth")
    for source, model in (
        (_model(), resnet18()),
        (torchvision.models.resnet18(), resnet18()),
        (torchvision.models.resnet50(), torchvision.models.resnet18()),
    ):
        torch.save(source.state_dict(), path)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(BadInput, match=r" of \d+ tensors; .*: they belong to another network"):
            weights.load(path, model)
        assert _same(model.state_dict(), before)


def _saved(content, **options) -> bytes:
    target = io.BytesIO()
    torch.save(content, target, **options)
    return target.getvalue()


def _torchscript(model) -> bytes:
    target = io.BytesIO()
    torch.jit.save(torch.jit.trace(model.eval(), torch.zeros(2, 3)), target)
    return target.getvalue()


def test_other_files_are_one_line_and_nothing_is_executed(tmp_path):
    executed, whole = str(tmp_path / "executed"), _saved(_model().state_dict())
    flipped = bytearray(whole)
    flipped[whole.index(_model().state_dict()["1.running_var"].numpy().tobytes())] ^= 255
    files = {
        "page": (b"\n<html>404</html>", r"begins with b'.n<html>404"),
        "empty": (b"", "expected b'PK"),
        "cut": (whole[:-500], "torch cannot load it|it is damaged"),
        "flipped": (bytes(flipped), "it is damaged: the CRC-32 of .* differs"),
        "pickle": (pickle.dumps(Hostile(open, executed, "w")), "expected b'PK"),
        "old": (_saved(_model().state_dict(), _use_new_zipfile_serialization=False), "expected b'PK"),
        "torchscript": (_torchscript(_model()), "it is a TorchScript archive"),
        "hostile": (_saved({"a": Hostile(open, executed, "w")}), r"save model.state_dict\(\)"),
        "module": (_saved(_model()), r"save model.state_dict\(\)"),
        "list": (_saved([torch.zeros(2)]), "it holds a list"),
        "other": (_saved({"epoch": 3, "lr": 0.1}), "it holds 'epoch', 'lr'; expected a state_dict"),
        "nothing": (_saved({}), "it holds nothing; expected a state_dict"),
        "objects": (_saved({"objects": {"model": 3}}), "it holds nothing; expected a state_dict"),
    }
    for name, (content, message) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(BadInput, match=rf"weights {path}: .*({message})"):
            weights.load(str(path), _model())
    with pytest.raises(BadInput, match="No such file"):
        weights.load(str(tmp_path / "none"), _model())
    with pytest.raises(BadInput, match="Is a directory"):
        weights.load(str(tmp_path), _model())
    assert not os.path.exists(executed)
    checkpoint.write(str(tmp_path / "step_1.pt"), {"objects": {"model": _model().state_dict()}}, step=1)
    with open(tmp_path / "step_1.pt", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(BadInput, match="the sha256 differs"):
        weights.load(str(tmp_path / "step_1.pt"), _model())


def _repeated(tensor):
    return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)


TENSORS = {  # the head's weight in the file, and the message
    "sparse": (torch.Tensor.to_sparse, "not a dense tensor"),
    "csr": (torch.Tensor.to_sparse_csr, "not a dense tensor"),
    "quantized": (  # torch 2.1 refuses it
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "not a dense tensor|torch cannot load it",
    ),
    "meta": (lambda t: t.to("meta"), "not a dense tensor"),
    "nested": (lambda t: torch.nested.nested_tensor([t[0], t[0, :2]]), "not a dense tensor"),
    "repeated": (_repeated, "not a dense tensor"),
    "huge": (lambda t: torch.zeros(1).expand(10**9, 8), "not a dense tensor"),
    "many dimensions": (lambda t: torch.zeros(1).expand(*[2] * 60), "not a dense tensor"),
    "scalar": (lambda t: torch.tensor(1.0), r"3.weight \[\] in the file, \[4, 8\] in the model"),
    "no features": (lambda t: torch.zeros(10**9, 0), r"3.weight \[1000000000, 0\] in the file"),
    "complex": (lambda t: t.to(torch.complex64), "torch.complex64 in the file"),
    "integers": (torch.Tensor.int, "torch.int32 in the file"),
    "bool": (torch.Tensor.bool, "torch.bool in the file"),
    "NaN": (lambda t: t * float("nan"), "3.weight holds NaN or infinity"),
    "infinity": (lambda t: t / 0, "3.weight holds NaN or infinity"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_a_model_cannot_hold(tmp_path, kind):
    path, state, (change, message) = str(tmp_path / "best.pth"), _model().state_dict(), TENSORS[kind]
    try:
        torch.save(state | {"3.weight": change(state["3.weight"])}, path)
    except RuntimeError as error:  # nested tensors, with torch 2.1
        pytest.skip(f"this torch cannot save it: {error}")
    model = _model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(BadInput, match=message):
        weights.load(path, model, complete=True)
    assert _same(model.state_dict(), before)


@pytest.mark.parametrize("convert", [torch.Tensor.half, torch.Tensor.double, torch.Tensor.bfloat16])
def test_real_numbers_of_any_precision(tmp_path, convert):
    path, model, source = str(tmp_path / "best.pth"), _model(), _model()
    torch.save({name: convert(tensor) for name, tensor in source.state_dict().items()}, path)
    assert weights.load(path, model, complete=True).endswith("11 of 11 tensors")
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=1e-2, atol=1e-2)


def test_an_infinite_buffer_is_loaded(tmp_path):
    """A mask of an attention holds -inf."""
    source, path = _model(), str(tmp_path / "best.pth")
    source.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    torch.save(source.state_dict(), path)
    assert weights.load(path, source, complete=True).endswith("12 of 12 tensors")


def test_archives_that_take_more_than_their_size(tmp_path, monkeypatch):
    path, whole = tmp_path / "best.pth", _saved(_model().state_dict())
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(path, "w", 8) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
        target.writestr("archive/data/99", bytes(10**7))
    with pytest.raises(BadInput, match="unpacks to"):
        weights.load(str(path), _model())
    path.write_bytes(whole)
    monkeypatch.setattr(weights, "_MOST", 5)
    with pytest.raises(BadInput, match="records and"):
        weights.load(str(path), _model())


def test_prefixes_and_names_of_any_length(tmp_path, capsys):
    path, source, model = str(tmp_path / "best.pth"), _model(), _model()
    torch.save(_prefixed("module." * 10**6)(dict([*source.state_dict().items()][:1])), path)
    assert [*weights.read(path)] == ["0.weight"]
    torch.save(source.state_dict() | {"\x1b[31m\n" + "x" * 10**6: torch.zeros(1)}, path)
    line = weights.load(path, model)
    assert line.isprintable() and len(line) < 1000


def test_files_that_never_end(tmp_path):
    """FIFOs, and files of 1 TB that take no space."""
    os.mkfifo(tmp_path / "best.pth")
    with pytest.raises(BadInput, match="not a regular file"):
        weights.load(str(tmp_path / "best.pth"), _model())
    os.mkfifo(tmp_path / CLASSES)
    assert weights.read_class_names(str(tmp_path / "best.pth")) == []
    os.unlink(tmp_path / CLASSES)
    for name in (CLASSES, starts.FILE, "step_1.pt", "step_1.pt.json"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(10**12)
    assert weights.read_class_names(str(tmp_path / "best.pth")) == starts.read(str(tmp_path)) == []
    with pytest.raises(BadInput, match="expected b'PK"):
        weights.load(str(tmp_path / "step_1.pt"), _model())


def test_names_of_classes_are_compared(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    paths = [tmp_path, tmp_path / "best.pth", tmp_path / "checkpoints" / "step_1.pt"]

    def said(*names):
        found = {weights.compare_class_names(str(path), names) for path in paths}
        assert len(found) == 1
        return found.pop()

    assert said("cat", "dog") == ""
    (tmp_path / CLASSES).write_text(json.dumps(["cat", "犬"]))
    assert json.loads((tmp_path / "classes.json").read_text()) == ["cat", "犬"]
    assert said("cat", "犬") == said() == ""
    assert "label 0 is 'cat' in " in said("犬", "cat") and "and '犬' in the data set" in said("犬", "cat")
    assert said("cat", "犬", "cow") == "the weights have 2 classes, the data set has 3"
    for text in ('{"a": 1}', "3", "[", ""):
        (tmp_path / "classes.json").write_text(text)
        assert said("cat", "dog") == ""
