"""Files of weights load if they fit, are reported if they fit in part, and are refused otherwise."""

import argparse
import io
import json
import os
import pickle
import re
import zipfile

import pytest
import torch
from torch import nn

from bootfile.exact import files as checkpoint
from bootfile.ground.errors import BadInput
from bootfile.ground.results import CLASSES
from common.checkpoint import weights
from common.checkpoint.scores import plain_names
from common.compute.models import resnet18
from tests.support.hostile_pickle import Hostile


def _model(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, classes))


def _same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _prefixed(prefix: str):
    return lambda state: {f"{prefix}{name}": tensor for name, tensor in state.items()}


def _wrapped_part(state: dict, wrapper: str) -> dict:
    return {name.replace("2.", f"2.{wrapper}.", 1) if name[0] == "2" else name: state[name] for name in state}


FORMS = {
    "best.pth": dict,
    "DistributedDataParallel": _prefixed("module."),
    "torch.compile": _prefixed("_orig_mod."),
    "both": _prefixed("module._orig_mod."),
    "torch.compile of a part": lambda state: _wrapped_part(state, "_orig_mod"),
    "FSDP of a part": lambda state: _wrapped_part(state, "_fsdp_wrapped_module"),
    "activation checkpointing": lambda state: _wrapped_part(state, "_checkpoint_wrapped_module"),
    "DataParallel of a part": lambda state: _wrapped_part(state, "module"),
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


def _refuse(path, message: str, model: nn.Module | None = None, **options) -> None:
    """Assert that a file is refused, and that the model is as before."""
    model = model or _model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(BadInput, match=message):
        weights.load(str(path), model, **options)
    assert _same(model.state_dict(), before)


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


DICTIONARIES = {  # content of a file of another program: the end of the line
    "NVIDIA": (lambda state: {"epoch": 3, "state_dict": _prefixed("module.")(state)}, " of its 'state_dict'"),
    "torchvision": (
        lambda state: {"model": state, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=0.1)},
        " of its 'model'",
    ),
    "torch's ImageNet": (
        lambda state: {"best_acc1": torch.ones(()), "state_dict": state}, " of its 'state_dict'"
    ),
    "timm": (
        lambda state: {"state_dict": state, "state_dict_ema": _model().state_dict()},
        " of its 'state_dict' (not of 'state_dict_ema')",
    ),
    "Lightning": (
        lambda state: {"state_dict": _prefixed("model.")(state), "epoch": 3},
        " of its 'state_dict' without the prefix 'model.'",
    ),
    "one": (lambda state: {"generator": state}, " of its 'generator'"),
    "a number": (lambda state: {"epoch": 3, 0: state}, " of its 0"),
    "prefix": (_prefixed("backbone.net."), " without the prefix 'backbone.net.'"),
    "prefix and part": (
        lambda state: _prefixed("net.")(_wrapped_part(state, "_orig_mod")), " without the prefix 'net.'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", DICTIONARIES)
def test_dictionaries_of_other_programs(tmp_path, form):
    path, model, source = str(tmp_path / "file.pt"), _model(), _model()
    change, end = DICTIONARIES[form]
    if form == "torchvision" and not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("torch before 2.5 refuses it")
    torch.save(change(source.state_dict()), path)
    assert weights.load(path, model, True) == f"weights from {path}: 11 of 11 tensors{end}"
    assert _same(model.state_dict(), source.state_dict())


def test_safetensors(tmp_path):
    torch_file = pytest.importorskip("safetensors.torch")
    path, model, source = str(tmp_path / "model.safetensors"), _model(), _model()
    source[2].weight = model[2].weight  # both have a tied pair below
    state = source.state_dict()
    torch_file.save_file(state, path)
    assert weights.load(path, model, True).endswith("11 of 11 tensors")
    assert _same(model.state_dict(), state)
    tied = nn.ModuleDict({"embed": nn.Embedding(4, 8), "head": nn.Linear(8, 4, bias=False)})
    tied.head.weight = tied.embed.weight
    torch_file.save_file({"embed.weight": torch.ones(4, 8)}, path)
    assert weights.load(path, tied, True).endswith(": 2 of 2 tensors")
    assert torch.equal(tied.head.weight, torch.ones(4, 8))
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 1)
    _refuse(path, "it is damaged: SafetensorError", model)


def test_names_that_are_not_clear_are_refused(tmp_path):
    path, state = str(tmp_path / "best.pth"), _model().state_dict()
    both = _prefixed("student.")(state) | _prefixed("teacher.")(state)
    twice = {"0._orig_mod.weight": state["0.weight"], "0.module.weight": state["0.weight"]}
    rest = {name: each for name, each in state.items() if name != "0.weight"}
    files = {
        "several networks in it .*student., teacher.": both,
        "it holds 'student', 'teacher'; keep one": {"student": state, "teacher": state},
        "it holds 1, 'teacher'; keep one": {1: state, "teacher": state},
        "not .*file: 0.weight; not .*model: 0._orig_mod.weight, 0.module.weight": twice | rest,
        "_flat_param is of FSDP": {"_fsdp_wrapped_module._flat_param": torch.zeros(99)},
    }
    for message, content in files.items():
        torch.save(content, path)
        _refuse(path, message)


def test_a_module_with_the_name_of_a_wrapper(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.weight = nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(2, 2))

    path = str(tmp_path / "best.pth")
    for change in (dict, _prefixed("module."), _prefixed("_orig_mod.")):
        source, model = Own(), Own()
        torch.save(change(source.state_dict()), path)
        weights.load(path, model, True)
        assert _same(model.state_dict(), source.state_dict())


def test_a_part_that_fits_needs_an_option(tmp_path):
    path, source = str(tmp_path / "best.pth"), _model()
    state = source.state_dict()
    rest = {name: each for name, each in state.items() if name != "2.bias"}
    for content, names in (
        (rest, "not in the file: 2.bias"),
        (state | {"4.weight": torch.ones(2)}, "not in the model: 4.weight"),
        (state | {"0.weight": torch.ones(8, 1)}, r"different shape: 0.weight \[8, 1\] in the file"),
        (state | {"0.bias": torch.ones(9), "3.bias": torch.ones(5)}, "different shape: 0.bias"),
    ):
        torch.save(content, path)
        _refuse(path, f"{names}.* --weights .*,partial uses those that fit")
        model = _model()
        weights.load(path, model, partial=True)
        assert torch.equal(model[2].weight, source[2].weight)
        _refuse(path, f"{names}.* expected all ", complete=True, partial=True)
    deep, flat = (nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]) for count in (3, 2))
    torch.save(deep.state_dict(), path)
    _refuse(path, r"\b4 of 4 .*not .*model: 2.weight, 2.bias: ", flat)
    words = [nn.Sequential(nn.Embedding(count, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for count in (9, 8)]
    torch.save(words[0].state_dict(), path)
    _refuse(path, r"different shape: 0.weight \[9, 4\]", words[1])


def test_another_head_is_reported_and_left_as_it_is(tmp_path):
    path, source, model = str(tmp_path / "best.pth"), _model(classes=9), _model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(source.state_dict(), path)
    _refuse(path, r"\b9 of 11 .* shape: 3.weight \[9, 8\] .*file, \[4", model, complete=True)
    line = weights.load(path, model)
    assert re.search(r" shape: 3.weight \[9, 8\] .*file, \[4, 8\] .*model, 3.bias \[9\]", line)
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
        _refuse(path, r" of \d+ tensors; .* another network", model)


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
        "flipped": (bytes(flipped), "damaged: .*CRC-32 .*differs"),
        "pickle": (pickle.dumps(Hostile(open, executed, "w")), "expected b'PK"),
        "old": (
            _saved(_model().state_dict(), _use_new_zipfile_serialization=False),
            r"torch before 1\.6\. .*: python -c .*torch.save\(torch.load\(.*old', weights_only=True\)",
        ),
        "LFS": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS: git lfs pull"),
        "torchscript": (_torchscript(_model()), r"TorchScript .*torch.jit.load\(.*\).state_dict"),
        "hostile": (_saved({"a": Hostile(open, executed, "w")}), r"save model.state_dict\(\)"),
        "module": (_saved(_model()), r"save model.state_dict\(\).*weights_only=False\).state_dict\(\)"),
        "list": (_saved([torch.zeros(2)]), "it holds a list"),
        "other": (_saved({"epoch": 3, "lr": 0.1}), "it holds 'epoch', 'lr'; expected a state_dict"),
        "nothing": (_saved({}), "it holds nothing; expected a state_dict"),
        "objects": (_saved({"objects": {"model": 3}}), "it holds nothing; expected a state_dict"),
    }
    for name, (content, message) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        _refuse(path, rf"weights {path}: .*({message})")
    _refuse(tmp_path / "none", "No such file")
    (tmp_path / "best.pth").write_bytes(whole)
    _refuse(tmp_path, r"Is a directory; .*: best.pth")
    folder = tmp_path / "of a run"
    folder.mkdir()
    (folder / ".metadata").touch()
    _refuse(folder, rf"a distributed checkpoint: python -m torch.distributed.*torch '{folder}' new.pth")
    assert not os.path.exists(executed)
    checkpoint.write(str(tmp_path / "step_1.pt"), {"objects": {"model": _model().state_dict()}}, step=1)
    with open(tmp_path / "step_1.pt", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    _refuse(tmp_path / "step_1.pt", "changed after")


def _repeated(tensor):
    return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)


TENSORS = {  # the head's weight in the file, and the message
    "sparse": (torch.Tensor.to_sparse, "not a dense tensor"),
    "quantized": (  # torch 2.1 refuses it
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "not a dense tensor|torch cannot load it",
    ),
    "meta": (lambda t: t.to("meta"), "not a dense tensor"),
    "nested": (lambda t: torch.nested.nested_tensor([t[0], t[0, :2]]), "not a dense tensor"),
    "repeated": (_repeated, "not a dense tensor"),
    "huge": (lambda t: torch.zeros(1).expand(10**9, 8), "not a dense tensor"),
    "scalar": (lambda t: torch.tensor(1.0), r"3.weight \[\] .*file, \[4, 8\] .*model"),
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
    _refuse(path, message, complete=True)


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
    _refuse(path, "unpacks to")
    path.write_bytes(whole)
    monkeypatch.setattr(weights, "_MOST", 5)
    _refuse(path, "records and")


def test_files_that_never_end(tmp_path):
    """FIFOs, and a file of 1 TB that takes no space."""
    os.mkfifo(tmp_path / "best.pth")
    _refuse(tmp_path / "best.pth", "not a regular file")
    os.mkfifo(tmp_path / CLASSES)
    assert weights.read_class_names(str(tmp_path / "best.pth")) == []
    (tmp_path / "step_1.pt").touch()
    os.truncate(tmp_path / "step_1.pt", 10**12)
    _refuse(tmp_path / "step_1.pt", "expected b'PK")


def test_names_of_classes_are_compared(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    paths = [tmp_path, tmp_path / "best.pth", tmp_path / "checkpoints" / "step_1.pt"]
    paths += [f"{tmp_path}/checkpoints/", tmp_path / "checkpoints" / "."]

    def said(*names):
        found = {weights.compare_class_names(str(path), names) for path in paths}
        assert len(found) == 1
        return found.pop()

    assert said("cat", "dog") == ""
    (tmp_path / CLASSES).write_text(json.dumps(["cat", "犬"]))
    assert json.loads((tmp_path / "classes.json").read_text()) == ["cat", "犬"]
    assert said("cat", "犬") == said() == ""
    assert "label 0 is 'cat' in " in said("犬", "cat") and "and '犬' in the data set" in said("犬", "cat")
    assert re.search(r"weights .*\b2 classes\b.* data set .*\b3\b", said("cat", "犬", "cow"))
    for text in ('{"a": 1}', "3", "[", ""):
        (tmp_path / "classes.json").write_text(text)
        assert said("cat", "dog") == ""


def test_weights_are_saved_with_the_names_of_the_module(tmp_path):
    """A block of a user's job may wrap the model or a part of it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = _model()

    plain = _model()
    part, nested = _model(), Own()
    part[2], part[0] = torch.compile(part[2]), checkpoint_wrapper(part[0])
    nested.module[2] = nn.DataParallel(torch.compile(nested.module[2]))
    for model, prefix in (
        (plain, ""), (torch.compile(plain), ""), (nn.DataParallel(torch.compile(plain)), ""), (part, ""),
        (nested, "module."),
    ):  # fmt: skip
        names = plain_names(model, model.state_dict())
        assert [*names] == [f"{prefix}{name}" for name in plain.state_dict()]
        torch.save(names, tmp_path / "best.pth")
        assert weights.load(str(tmp_path / "best.pth"), model, True).endswith("11 of 11 tensors")
