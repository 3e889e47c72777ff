"""Load the weights of a file into a model, and compare the names of the classes.

A file of weights is best.pth, epoch_<n>.pth, a checkpoint step_<n>.pt, or a file of another program: a
state_dict, a dictionary that holds one, or safetensors. The names of wrappers (plain_names.WRAPPERS) and one
prefix of all names, such as Lightning's (model.), are taken off.
"""

import argparse
import contextlib
import json
import math
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bootfile.exact import dtensors
from bootfile.exact import files as checkpoint
from bootfile.exact.foreign_files import CONVERT
from bootfile.ground.errors import BadInput, import_optional, in_one_line, printable
from bootfile.ground.files import explained, opener
from bootfile.ground.results import CLASSES, checkpoints
from bootfile.processes import ranks
from common.checkpoint import pretrained
from common.checkpoint.plain_names import WRAPPERS
from common.run.output import Output

_SHOWN = 3  # tensors named in a line
_MOST = 50_000  # tensors of a file; torch loads them in 4 s
_WRAPPERS = (*WRAPPERS, "module")  # the last: of DataParallel, or a module of the user's
_WHOLE = ("state_dict", "model", "model_state_dict")  # keys of a state_dict in a file of other programs
_COUNTERS = "num_batches_tracked"  # of BatchNorm; files of old versions of torch do not have it


def load(
    path: str,
    model: torch.nn.Module,
    complete: bool = False,
    arch: str | None = None,
    partial: bool = False,
) -> str:
    """Load the weights of a file on every rank; rank 0 reads it. Return one line about the loaded tensors.

    path: the file; if `arch` is given, also the name of published weights of this network (pretrained.py).
    model: the model that gets the weights.
    complete: every tensor of the model must be in the file. Otherwise a head for another number of classes
        keeps its values.
    arch: the name of the network.
    partial: tensors that are missing, not in the model, or of another shape are not errors either.
    Raises BadInput on every rank if the file cannot be read or does not fit, and always if it has fewer than
    half of the model's weights.
    """
    is_name = bool(arch) and pretrained.is_name(arch, path)
    tensors, taken = ranks.call_on_first(
        lambda: (pretrained.read(str(arch), path), "") if is_name else read(path)
    )
    return fill(path, model, tensors, complete, partial, taken, is_name)


def file_of(args: argparse.Namespace, output: Output) -> str | None:
    """Return --weights if it is a file; None if it names published weights of --arch, or is not given.

    args: the options weights and, if the job has it, arch. Published weights are downloaded, unless
    a checkpoint may replace them. Raises BadInput on every rank if they cannot be, or do not exist.
    """
    arch = getattr(args, "arch", None)
    if arch and args.weights and pretrained.is_name(arch, args.weights):
        pretrained.check(arch, args.weights)
        may_resume = output.url or checkpoints(output.folder)
        ranks.call_on_first(lambda: may_resume or bool(pretrained.read(arch, args.weights)))
        return None
    return args.weights


def read(path: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return (the tensors of a file of weights by name, on the CPU; which of its dictionaries they are, as
    text, or "").

    From a checkpoint it returns the averaged weights (--ema) if there are any. Nothing in the file is
    executed. Raises BadInput.
    """
    try:
        if _is_safetensors(path):
            reader = import_optional("safetensors.torch", f"{path} needs safetensors", "safetensors")
            content = reader.load_file(path)
        else:
            # other programs save their options, too; torch before 2.5 cannot allow these
            allow: Any = getattr(torch.serialization, "safe_globals", contextlib.nullcontext)
            with warnings.catch_warnings(), allow([argparse.Namespace]):
                warnings.simplefilter("ignore")  # torch warns about kinds of tensors that are refused below
                content = checkpoint.load(path, _MOST)
            if os.path.exists(f"{path}.json"):
                checkpoint.verify(path)
            else:
                _check_crc(path)
    except checkpoint.Refused as error:
        raise BadInput(f"weights {path}: {error}{_look_into(path)}") from error
    except BadInput:
        raise
    except Exception as error:  # of safetensors
        raise BadInput(f"weights {path}: it is damaged: {in_one_line(error)}") from error
    objects, taken = content.get("objects"), ""
    if isinstance(objects, dict):
        kept = objects.get("ema") or objects.get("model")
        content = kept if isinstance(kept, dict) else {}
    elif inner := {name: each for name, each in content.items() if _tensors(each)}:
        known = [name for name in _WHOLE if name in inner]
        if not known and not _tensors(content):
            known = [*inner] if len(inner) == 1 else []
            if not known:
                line = CONVERT.format(f"torch.load({path!r})[{min(inner)!r}]")
                raise BadInput(f"weights {path}: it holds {_some([*map(repr, inner)])}; keep one: {line}")
        if known:
            content = inner.pop(known[0])
            others = f" (not of {_some([*map(repr, inner)])})" if inner else ""
            taken = f" of its {known[0]!r}{others}"
    tensors = _tensors(content)
    if not tensors:
        names = ", ".join(f"{name!r:.40}" for name in list(content)[:_SHOWN])
        raise BadInput(f"weights {path}: it holds {names or 'nothing'}; expected a state_dict, name: tensor")
    for name, tensor in tensors.items():
        if not _is_dense(tensor):
            raise BadInput(f"weights {path}: {name:.80} is not a dense tensor with all its elements")
        if "flat_param" in name.rpartition(".")[2]:
            raise BadInput(
                f"weights {path}: {name:.80} is of FSDP: save it with StateDictType.FULL_STATE_DICT"
            )
    return tensors, taken


def _tensors(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a dictionary, name -> tensor, without the count of an averaged model."""
    return {
        name: each
        for name, each in (value.items() if isinstance(value, dict) else ())
        if isinstance(name, str) and isinstance(each, torch.Tensor) and name != "n_averaged"
    }


def _is_safetensors(path: str) -> bool:
    """Return whether a file begins as safetensors: the length of a JSON text, 8 bytes, and the text."""
    with contextlib.suppress(OSError), open(path, "rb", opener=opener) as file:
        return file.read(9)[8:] == b"{"
    return False


def _look_into(path: str) -> str:
    """Return the files of weights in a folder, as the end of an error; "" if it is not a folder."""
    if os.path.exists(os.path.join(path, ".metadata")):
        tool = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        return f"; a distributed checkpoint: {tool} {path} new.pth"
    names = os.listdir(path) if os.path.isdir(path) else []
    kept = sorted(name for name in names if name.endswith((".pth", ".pt", ".ckpt", ".bin", ".safetensors")))
    return f"; name one of its files: {_some(kept)}" if kept else ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are in memory, each at its own place: a small file can hold a
    tensor of any shape that repeats one element."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    return math.prod(tensor.shape) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _check_crc(path: str) -> None:
    """Raise Refused if the CRC-32 of a part of the zip file is wrong; torch.load does not check it."""
    # a damaged file can make zipfile raise any exception
    with explained("it is damaged", Exception, kind=checkpoint.Refused), zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged:
        raise checkpoint.Refused(f"it is damaged: the CRC-32 of {damaged} differs")


def fill(
    path: str,
    model: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    complete: bool = False,
    partial: bool = False,
    taken: str = "",
    published: bool = False,
) -> str:
    """Load the tensors of read() into a model, as load() does, but in this process only. On the meta device
    they are only compared with the model. published: tensors of the file may be left over."""
    own = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    given, unused, note = match(path, own, tensors)

    def fits(name: str) -> bool:
        there, here = given[name], own[name]  # a counter may be of any real type
        is_kind = there.is_floating_point() or not here.is_floating_point()
        return is_kind and there.is_complex() == here.is_complex() and there.shape == here.shape

    same = [name for name in own if name in given and fits(name)]
    other = [name for name in own if name in given and not fits(name)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {id(parameters[name]) for name in same if name in parameters}  # safetensors hold them once
    lost = [name for name in own if name not in given and id(parameters.get(name)) not in tied]
    missing = [name for name in lost if not name.endswith(_COUNTERS)]
    line = f"weights from {path}: {len(own) - len(lost) - len(other)} of {len(own)} tensors{taken}{note}"
    shapes = [f"{name} {_kind(given[name])} in the file, {_kind(own[name])} in the model" for name in other]
    differences = {"different shape": shapes, "not in the file": missing, "not in the model": unused}
    for text, several in differences.items():
        if several:
            line += f"; {text}: {_some(several)}"
    matrices = [name for name in own if own[name].ndim > 1] or list(own)
    if 2 * len(set(same) & set(matrices)) < len(matrices):
        new = f"{{name.replace('OLD', 'NEW'): each for name, each in torch.load({path!r}).items()}}"
        raise BadInput(
            f"{line}: they belong to another network, or to one of other names: " + CONVERT.format(new)
        )
    left = [name for name in unused if tensors[name].is_floating_point()] if not published else []
    if complete and (other or missing or left):
        raise BadInput(f"{line}: expected all of them, and no others")
    if not partial and (missing or left or not _is_head(model, own, {name: given[name] for name in other})):
        raise BadInput(
            f"{line}: expected all of them, apart from a head for another number of classes; "
            f"--weights {path},partial uses those that fit"
        )
    for name in same:  # a buffer may be infinite, for example a mask
        values = given[name] if given[name].is_complex() else given[name].float()
        if not (values.isfinite() if name in parameters else ~values.isnan()).all():
            raise BadInput(f"weights {path}: {name} holds NaN or infinity")
    if not any(tensor.is_meta for tensor in own.values()):
        loaded = dtensors.distribute({name: given[name] for name in same}, own)
        model.load_state_dict(loaded, strict=False)
    return f"{line}; the rest keeps its initial values" if other or missing else line


def match(
    path: str, own: Iterable[str], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str], str]:
    """Return (tensors by the names of a model, the names that are left over, the prefix that was taken off as
    text or "").

    own: the names of the model's tensors. The names of wrappers are taken off on both sides if more names are
    equal then: a module of the user's may have the name of a wrapper. Raises BadInput if this is ambiguous.
    """
    own, most, fit, here, there = list(own), 0, [""], {}, {}
    for wrappers in ((), _WRAPPERS):
        ours, theirs = ({_bare(name, wrappers): name for name in names} for names in (own, tensors))
        if len(ours) < len(own) or len(theirs) < len(tensors):
            continue  # two tensors would have one name
        depth = max((name.count(".") for name in ours), default=0)
        count = Counter(
            name.removesuffix(end) for name in theirs for end in _ends(name, depth) if end in ours
        )
        top = max(count.values(), default=0)
        starts = [start for start in count if count[start] == top]
        starts = [""] if "" in starts or 2 * top <= len(own) else starts
        if count[starts[0]] > most:
            most, fit, here, there = count[starts[0]], starts, ours, theirs
    if len(fit) > 1:
        raise BadInput(f"weights {path}: several networks in it have these names: {_some(fit)}; expected one")
    names = {here[name]: there[fit[0] + name] for name in here if fit[0] + name in there}
    used = {*names.values()}
    note = f" without the prefix {fit[0]!r:.80}" if _bare(fit[0], _WRAPPERS) else ""
    given = {name: tensors[each] for name, each in names.items()}
    return given, [name for name in tensors if name not in used], note


def _bare(name: str, wrappers: tuple[str, ...]) -> str:
    return ".".join(part for part in name.split(".") if part not in wrappers) if wrappers else name


def _ends(name: str, depth: int) -> Iterator[str]:
    """Yield the ends of a name that have at most `depth` dots, from dot to dot."""
    parts = name.split(".")
    return (".".join(parts[place:]) for place in range(max(0, len(parts) - depth - 1), len(parts)))


def _is_head(model: torch.nn.Module, own: dict, other: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors of other shapes differ in the number of classes only: it is the first dimension
    of all of them. A vocabulary is not a head: its tokens have other numbers."""
    sizes, modules = set(), dict(model.named_modules())
    for name, there in other.items():
        here, owner = own[name], modules.get(name.rpartition(".")[0])
        is_kind = there.is_floating_point() and min(there.ndim, here.ndim) > 0
        if not is_kind or there.shape[1:] != here.shape[1:] or isinstance(owner, torch.nn.Embedding):
            return False
        sizes.add((len(there), len(here)))
    return len(sizes) < 2


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
