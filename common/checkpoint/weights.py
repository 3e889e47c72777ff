"""Load the weights of a file into a model, and compare the names of the classes.

A file of weights is best.pth, epoch_<n>.pth, a checkpoint step_<n>.pt, or the state_dict of a model that was
wrapped by DistributedDataParallel (module.) or torch.compile (_orig_mod.).
"""

import argparse
import json
import math
import os
import re
import warnings
import zipfile

import torch

from common.checkpoint import files as checkpoint
from common.checkpoint import pretrained
from common.distributed import ranks, sharding
from common.ground.exits import BadInput, printable
from common.ground.files import opener
from common.run import output
from common.run.metrics import CLASSES

_SHOWN = 3  # tensors named in a line
_MOST = 50_000  # tensors of a file; torch loads them in 4 s
_WRAPPERS = re.compile(r"(module\.|_orig_mod\.)*")
_COUNTERS = "num_batches_tracked"  # of BatchNorm; files of old versions of torch do not have it


def load(path: str, model: torch.nn.Module, complete: bool = False, arch: str | None = None) -> str:
    """Load the weights of a file on every rank; rank 0 reads it. Return one line about the loaded tensors.

    path: the file; if `arch` is given, also the name of published weights of this network (pretrained.py).
    model: the model that gets the weights.
    complete: every tensor of the model must be in the file. Otherwise tensors that are missing or have
        another shape, such as those of a head for other classes, keep their values.
    arch: the name of the network.
    Raises BadInput on every rank if the file cannot be read, or has fewer than half of the model's weights.
    """
    is_name = bool(arch) and pretrained.is_name(arch, path)
    tensors = ranks.call_on_first(lambda: pretrained.read(str(arch), path) if is_name else read(path))
    return fill(path, model, tensors, complete)


def file_of(args: argparse.Namespace) -> str | None:
    """Return --weights if it is a file; None if it names published weights of --arch, or is not given.

    args: the options weights, output and, if the job has it, arch. Published weights are downloaded, unless
    a checkpoint may replace them. Raises BadInput on every rank if they cannot be, or do not exist.
    """
    arch = getattr(args, "arch", None)
    if arch and args.weights and pretrained.is_name(arch, args.weights):
        pretrained.check(arch, args.weights)
        may_resume = args.output.url or output.checkpoints(args.output.folder)
        ranks.call_on_first(lambda: may_resume or bool(pretrained.read(arch, args.weights)))
        return None
    return args.weights


def read(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of weights by name, on the CPU, without the prefixes of wrappers.

    From a checkpoint it returns the averaged weights (--ema) if there are any. Nothing in the file is
    executed. Raises BadInput.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about kinds of tensors that are refused below
            content = checkpoint.load(path, _MOST)
        if os.path.exists(f"{path}.json"):
            checkpoint.verify(path)
        else:
            _check_crc(path)
    except checkpoint.Refused as error:
        raise BadInput(f"weights {path}: {error}") from error
    objects = content.get("objects")
    if isinstance(objects, dict):
        kept = objects.get("ema") or objects.get("model")
        content = kept if isinstance(kept, dict) else {}
    tensors = {
        _bare(name): value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor) and name != "n_averaged"
    }
    if not tensors:
        names = ", ".join(f"{name!r:.40}" for name in list(content)[:_SHOWN])
        raise BadInput(f"weights {path}: it holds {names or 'nothing'}; expected a state_dict, name: tensor")
    for name, tensor in tensors.items():
        if not _is_dense(tensor):
            raise BadInput(f"weights {path}: {name:.80} is not a dense tensor with all its elements")
    return tensors


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are in memory, each at its own place: a small file can hold a
    tensor of any shape that repeats one element."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    return math.prod(tensor.shape) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _check_crc(path: str) -> None:
    """Raise Refused if the CRC-32 of a part of the zip file is wrong; torch.load does not check it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged file can make zipfile raise any exception
        raise checkpoint.Refused(f"it is damaged: {error}") from error
    if damaged:
        raise checkpoint.Refused(f"it is damaged: the CRC-32 of {damaged} differs")


def _bare(name: str) -> str:
    return _WRAPPERS.sub("", name, count=1)


def fill(path: str, model: torch.nn.Module, tensors: dict[str, torch.Tensor], complete: bool = False) -> str:
    """Load the tensors of read() into a model, as load() does, but in this process only. On the meta device
    they are only compared with the model."""
    own = model.state_dict()
    names = {_bare(name): name for name in own}

    def fits(name: str) -> bool:
        there, here = tensors[name], own[names[name]]  # a counter may be of any real type
        is_kind = there.is_floating_point() or not here.is_floating_point()
        return is_kind and there.is_complex() == here.is_complex() and there.shape == here.shape

    same = [name for name in names if name in tensors and fits(name)]
    other = [
        f"{name} {_kind(tensors[name])} in the file, {_kind(own[names[name]])} in the model"
        for name in names
        if name in tensors and not fits(name)
    ]
    missing = [name for name in names if name not in tensors and not name.endswith(_COUNTERS)]
    unused = [name for name in tensors if name not in names]
    line = f"weights from {path}: {len(same)} of {len(names)} tensors"
    differences = {"different shape": other, "not in the file": missing, "not in the model": unused}
    for text, several in differences.items():
        if several:
            line += f"; {text}: {_some(several)}"
    matrices = [name for name in names if own[names[name]].ndim > 1] or list(names)
    if 2 * len(set(same) & set(matrices)) < len(matrices):
        raise BadInput(f"{line}: they belong to another network")
    if complete and (other or missing):
        raise BadInput(f"{line}: expected all of them")
    parameters = dict(model.named_parameters())
    for name in same:  # a buffer may be infinite, for example a mask
        values = tensors[name] if tensors[name].is_complex() else tensors[name].float()
        if not (values.isfinite() if names[name] in parameters else ~values.isnan()).all():
            raise BadInput(f"weights {path}: {name} holds NaN or infinity")
    if not any(tensor.is_meta for tensor in own.values()):
        loaded = sharding.shard({names[name]: tensors[name] for name in same}, own)
        model.load_state_dict(loaded, strict=False)
    return f"{line}; the rest keeps its initial values" if other or missing else line


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)}" + f" {tensor.dtype}" * (not tensor.is_floating_point())


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(f"{name:.160}") for name in names[:_SHOWN]) + more


def run_folder(path: str) -> str:
    """Return the output folder of the run that a file of weights belongs to."""
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    return os.path.dirname(folder) if os.path.basename(folder) == "checkpoints" else folder


def read_class_names(path: str) -> list[str]:
    """Return the names of the classes in the run folder of a file of weights; [] if they are not stored."""
    try:
        with open(os.path.join(run_folder(path), CLASSES), encoding="utf-8", opener=opener) as file:
            names = json.loads(file.read(2**24))
    except (OSError, ValueError, RecursionError):
        return []
    return names if isinstance(names, list) else []


def compare_class_names(path: str, names: tuple[str, ...]) -> str:
    """Return a line if the run folder of a file of weights has other names of classes, else ""."""
    theirs = read_class_names(path)
    if not names or not theirs or theirs == list(names):
        return ""
    if len(theirs) != len(names):
        return f"the weights have {len(theirs)} classes, the data set has {len(names)}"
    label = next(label for label, name in enumerate(names) if theirs[label] != name)
    return (
        f"warning: the weights were trained with other classes: label {label} is {theirs[label]!r:.80} in "
        f"{os.path.join(run_folder(path), CLASSES)} and {names[label]!r:.80} in the data set"
    )
