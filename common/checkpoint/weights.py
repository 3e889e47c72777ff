"""Read files of weights or published weights, and load them into a model.

It takes best.pth, epoch_<n>.pth, a checkpoint step_<n>.pt, or a file of another program: a state_dict, a
dictionary that holds one, or safetensors. read() checks it once, and returns dense tensors by their names:
nothing in the file is executed, and no code after read() asks again. The names of wrappers (WRAPPERS) and one
prefix of all names, such as Lightning's (model.), are taken off. Outside are files of pickled modules,
TorchScript and distributed checkpoints: the error has the line of Python that converts them.
Published weights are those of torchvision and timm, by the names of the network and of the weights.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shlex
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from bootfile.exact import checked_files, distributed_states, recorded
from bootfile.exact import files as checkpoint
from bootfile.exact.foreign_files import CONVERT
from bootfile.ground.again import is_temporary, refusal
from bootfile.ground.errors import BadInput, import_optional, in_one_line, printable
from bootfile.ground.files import explained, opener, read_again, sha256_file
from bootfile.ground.results import CLASSES, checkpoints
from bootfile.processes import ranks
from common.checkpoint.scores import WRAPPERS
from common.compute.networks import TIMM, import_timm
from common.run.output import Output

DEFAULT = "DEFAULT"  # the name of the newest published weights of a network
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

    path: the file; if `arch` is given, also the name of published weights of this network.
    complete: every tensor of the model must be in the file. Otherwise a head for another number of classes
        keeps its values.
    partial: tensors that are missing, not in the model, or of another shape are not errors either.
    Raises BadInput on every rank if the file cannot be read or does not fit, and always if it has fewer than
    half of the model's weights.
    """
    published = is_published(arch, path)

    def read_on_first() -> tuple[dict[str, torch.Tensor], str]:
        return (read_published(str(arch), path), "") if published else read(path)

    tensors, taken = ranks.call_on_first(read_on_first)
    return fill(path, model, tensors, complete, partial, taken, published)


def file_of(args: argparse.Namespace, output: Output) -> str | None:
    """Return --weights if it is a file; None if it names published weights of --arch, or is not given.

    A job calls it on every rank before it builds the model. Published weights are downloaded, unless a
    checkpoint may replace them. Raises BadInput on every rank if they cannot be, or do not exist.
    """
    arch = vars(args).get("arch")  # another job takes files only
    name: str | None = args.weights
    if not name or not is_published(arch, name):
        return name
    check_published(str(arch), name)

    def download() -> None:
        if not output.url and not checkpoints(output.folder):
            read_published(str(arch), name)

    ranks.call_on_first(download)
    return None


def is_published(arch: str | None, text: str | None) -> bool:
    """Return whether --weights is a name of published weights (DEFAULT, IMAGENET1K_V1, a tag of timm)."""
    return bool(arch and text and re.fullmatch(r"[A-Za-z]\w*", text)) and not os.path.exists(str(text))


def check_published(arch: str, name: str) -> None:
    """Raise BadInput unless weights of this name are published for the network. Nothing is downloaded."""
    if arch.startswith(TIMM):
        model = arch.removeprefix(TIMM).partition(".")[0]
        tags = [name.partition(".")[2] for name in import_timm().list_pretrained(f"{model}.*")]
    else:
        tags = [*published_of(arch).__members__]
    names = list(dict.fromkeys([DEFAULT, *tags]))
    if name not in names:
        raise BadInput(f"--weights {name}: no such file; {arch} has {', '.join(names)}")


def read_published(arch: str, name: str) -> dict[str, torch.Tensor]:
    """Return published weights, name -> tensor, from the library's cache (torchvision: in TORCH_HOME) or
    downloaded. Raises BadInput."""
    try:
        if arch.startswith(TIMM):
            model = arch.removeprefix(TIMM)
            tagged = model if name == DEFAULT else f"{model.partition('.')[0]}.{name}"
            return import_timm().create_model(tagged, pretrained=True).state_dict()
        url = published_of(arch)[name].url
        path = os.path.join(torch.hub.get_dir(), "checkpoints", os.path.basename(url))
        digest = path.rpartition("-")[2].partition(".")[0]  # the first digits of the file's sha256
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.hub.download_url_to_file(url, path, digest, progress=False)
        # Also if the file was in the cache: another program may have put it there.
        if not sha256_file(path).startswith(digest):
            raise BadInput(f"{path} is damaged: its sha256 does not begin with {digest}; delete it")
        return torch.load(path, map_location="cpu", weights_only=True)
    except BadInput:
        raise
    except Exception as error:  # of the network, the disk, or timm
        raise BadInput(
            f"--weights {name} of {arch} is not in the cache and cannot be downloaded "
            f"({in_one_line(error)}): download it elsewhere, and pass the file"
        ) from error


def published_of(arch: str) -> Any:
    """Return torchvision's enumeration of the weights of a network."""
    import torchvision

    return torchvision.models.get_model_weights(arch)


def read(path: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return (the tensors of a file of weights by name, on the CPU; which of its dictionaries they are, as
    text, or ""). From a checkpoint it returns the averaged weights (--ema) if there are any. Nothing in the
    file is executed. Raises BadInput."""
    content, taken = _choose_state(path, read_again(functools.partial(_read_content, path), path))
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


def _read_content(path: str) -> Any:
    """Return the dictionary in a file of weights, and check its checksum if it has one. Raises BadInput."""
    try:
        if _is_safetensors(path):
            reader = import_optional("safetensors.torch", f"{path} needs safetensors", "safetensors")
            return reader.load_file(path)
        # other programs save their options, too; torch before 2.5 cannot allow these
        allow: Any = getattr(torch.serialization, "safe_globals", contextlib.nullcontext)
        with warnings.catch_warnings(), allow([argparse.Namespace]):
            warnings.simplefilter("ignore")  # torch warns about kinds of tensors that are refused below
            content = checked_files.load(path, _MOST)
        # a checkpoint of a run has a checksum in its .json; a file of another program has only the CRC of the
        # parts of its zip, which torch.load does not check
        if os.path.exists(f"{path}.json"):
            checked_files.verify(path)
            return content
        # a damaged file can make zipfile raise any exception
        with explained("it is damaged", Exception, kind=checkpoint.Refused), zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise checkpoint.Refused(f"it is damaged: the CRC-32 of {damaged} differs")
        recorded.check_weights(path)
        return content
    except BadInput:
        raise
    except Exception as error:  # Refused, or any of safetensors
        fault = "it cannot be read" if is_temporary(error) else "it is damaged"
        is_explained = isinstance(error, checkpoint.Refused)
        reason = f"{error}{_hint_for_folder(path)}" if is_explained else f"{fault}: {in_one_line(error)}"
        raise refusal(f"weights {path}: {reason}", error) from error


def _choose_state(path: str, content: Any) -> tuple[Any, str]:
    """Return (the dictionary of a file that holds the weights; which one it is, as text, or ""). A checkpoint
    of this package has them in "objects", and other programs in a dictionary of any name, next to those of
    the optimizer. Raises BadInput if several dictionaries may be the weights."""
    objects = content.get("objects")
    if isinstance(objects, dict):
        state = objects.get("ema") or objects.get("model")
        return state if isinstance(state, dict) else {}, ""
    # a file of another program: the weights are the file itself, or one of its dictionaries
    dictionaries = {name: value for name, value in content.items() if _tensors(value)}
    chosen = next((name for name in _WHOLE if name in dictionaries), None)
    # a state_dict may have a dictionary of tensors besides
    if not dictionaries or (chosen is None and _tensors(content)):
        return content, ""
    if chosen is None:
        chosen, *others = dictionaries  # the names may be of any type
        if others:
            line = CONVERT.format(f"torch.load({path!r})[{chosen!r}]")
            names = _list_first([*map(repr, dictionaries)])
            raise BadInput(f"weights {path}: it holds {names}; keep one: {line}")
    state = dictionaries.pop(chosen)
    rest = f" (not of {_list_first([*map(repr, dictionaries)])})" if dictionaries else ""
    return state, f" of its {chosen!r}{rest}"


def _tensors(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a dictionary, name -> tensor, without the count of an averaged model; {} for a
    value that is not a dictionary."""
    items = value.items() if isinstance(value, dict) else ()
    tensors = {name: tensor for name, tensor in items if isinstance(tensor, torch.Tensor)}
    return {name: tensors[name] for name in tensors if isinstance(name, str) and name != "n_averaged"}


def _is_safetensors(path: str) -> bool:
    """Return whether a file begins as safetensors: the length of a JSON text, 8 bytes, and the text."""
    try:
        with open(path, "rb", opener=opener) as file:
            return file.read(9)[8:] == b"{"
    except OSError as error:
        if is_temporary(error):
            raise
        return False  # the reader of checkpoints says why


def _hint_for_folder(path: str) -> str:
    """Return the end of an error: what to do with a folder of weights; "" for another path."""
    if os.path.exists(os.path.join(path, ".metadata")):
        tool = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        return f"; a distributed checkpoint: {tool} {shlex.quote(path)} new.pth"
    names = os.listdir(path) if os.path.isdir(path) else []
    files = sorted(name for name in names if name.endswith((".pth", ".pt", ".ckpt", ".bin", ".safetensors")))
    return f"; name one of its files: {_list_first(files)}" if files else ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are in memory, each at its own place: a small file can hold a
    tensor of any shape that repeats one element."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    return math.prod(tensor.shape) * tensor.element_size() <= tensor.untyped_storage().nbytes()


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
    ours = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    in_file, unused, note = match(path, ours, tensors)
    # what is in the file for the model, in two parts: tensors of another shape or kind, and those that fit
    different = {name: tensor for name, tensor in in_file.items() if not _can_load(tensor, ours[name])}
    loadable = {name: tensor for name, tensor in in_file.items() if name not in different}
    shapes = [
        f"{name} {_kind(tensor)} in the file, {_kind(ours[name])} in the model"
        for name, tensor in different.items()
    ]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # safetensors hold a parameter of several names once: under its other names it is not missing
    loaded = {id(parameters[name]) for name in loadable if name in parameters}
    absent = [name for name in ours if name not in in_file and id(parameters.get(name)) not in loaded]
    missing = [name for name in absent if not name.endswith(_COUNTERS)]
    count = len(ours) - len(absent) - len(different)
    line = f"weights from {path}: {count} of {len(ours)} tensors{taken}{note}"
    differences = {"different shape": shapes, "not in the file": missing, "not in the model": unused}
    line += "".join(f"; {text}: {_list_first(names)}" for text, names in differences.items() if names)
    # a network of other names may still share the names of a few vectors: count the matrices
    matrices = [name for name in ours if ours[name].ndim > 1] or list(ours)
    if 2 * len(loadable.keys() & set(matrices)) < len(matrices):
        new = f"{{name.replace('OLD', 'NEW'): each for name, each in torch.load({path!r}).items()}}"
        raise BadInput(
            f"{line}: they belong to another network, or to one of other names: " + CONVERT.format(new)
        )
    # of the tensors that the model lacks, those that are not floats, such as counters, do not count
    left_over = [name for name in unused if tensors[name].is_floating_point() and not published]
    if complete and (different or missing or left_over):
        raise BadInput(f"{line}: expected all of them, and no others")
    if not partial and (missing or left_over or not _is_head(model, ours, different)):
        raise BadInput(
            f"{line}: expected all of them, apart from a head for another number of classes; "
            f"--weights {path},partial uses those that fit"
        )
    # before the first weight changes; a buffer may be infinite, for example a mask
    for name, tensor in loadable.items():
        values = tensor if tensor.is_complex() else tensor.float()
        is_valid = values.isfinite() if name in parameters else ~values.isnan()
        if not is_valid.all():
            raise BadInput(f"weights {path}: {name} holds NaN or infinity")
    if not any(tensor.is_meta for tensor in ours.values()):
        model.load_state_dict(distributed_states.distribute(loadable, ours), strict=False)
    return f"{line}; the rest keeps its initial values" if different or missing else line


def _can_load(tensor: torch.Tensor, ours: torch.Tensor) -> bool:
    """Return whether a tensor of a file has the shape and the kind of one of the model. A counter may be of
    any real type in the file."""
    is_real = tensor.is_floating_point() or not ours.is_floating_point()
    return is_real and tensor.is_complex() == ours.is_complex() and tensor.shape == ours.shape


def match(
    path: str, names_of_model: Iterable[str], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str], str]:
    """Return (tensors by the names of a model, names in the file that are left over, a note about the prefix
    that was taken off or "").

    The names of wrappers are taken off on both sides, unless two tensors would have one name then: a module
    of the user's may have the name of a wrapper. Raises BadInput if this is ambiguous.
    """
    names = list(names_of_model)
    for wrappers in (_WRAPPERS, ()):
        ours = {_bare(name, wrappers): name for name in names}
        theirs = {_bare(name, wrappers): name for name in tensors}
        if len(ours) == len(names) and len(theirs) == len(tensors):
            break
    # the prefix with which most names of the file are names of the model
    counts = _count_prefixes(ours, theirs)
    top = max(counts.values(), default=0)
    prefixes = [prefix for prefix, count in counts.items() if count == top]
    # a prefix counts only if most names of the model are in the file with it
    prefixes = [""] if "" in prefixes or 2 * top <= len(names) else prefixes
    if len(prefixes) > 1:
        raise BadInput(
            f"weights {path}: several networks in it have these names: {_list_first(prefixes)}; expected one"
        )
    prefix = prefixes[0]
    names_in_file = {name: theirs[prefix + bare] for bare, name in ours.items() if prefix + bare in theirs}
    in_file = {name: tensors[name_in_file] for name, name_in_file in names_in_file.items()}
    used = set(names_in_file.values())
    note = f" without the prefix {prefix!r:.80}" if _bare(prefix, _WRAPPERS) else ""
    return in_file, [name for name in tensors if name not in used], note


def _count_prefixes(ours: Iterable[str], theirs: Iterable[str]) -> Counter[str]:
    """Return prefix -> how many names of a file are this prefix and a name of the model."""
    depth = max((name.count(".") for name in ours), default=0)
    counts: Counter[str] = Counter()
    for name in theirs:
        parts = name.split(".")
        # the ends of the name, from dot to dot, that have as many parts as a name of the model may have
        for place in range(max(0, len(parts) - depth - 1), len(parts)):
            end = ".".join(parts[place:])
            if end in ours:
                counts[name.removesuffix(end)] += 1
    return counts


def _bare(name: str, wrappers: tuple[str, ...]) -> str:
    """Return the name of a tensor without the parts that are names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _is_head(
    model: torch.nn.Module, ours: dict[str, torch.Tensor], different: dict[str, torch.Tensor]
) -> bool:
    """Return whether tensors of other shapes differ in the number of classes only: it is the first dimension
    of all of them. An embedding is not a head: another vocabulary gives its tokens other numbers."""
    modules = dict(model.named_modules())
    counts = set()  # of classes, in the file and in the model
    for name, tensor in different.items():
        is_embedding = isinstance(modules.get(name.rpartition(".")[0]), torch.nn.Embedding)
        has_classes = tensor.is_floating_point() and min(tensor.ndim, ours[name].ndim) > 0
        if is_embedding or not has_classes or tensor.shape[1:] != ours[name].shape[1:]:
            return False
        counts.add((len(tensor), len(ours[name])))
    return len(counts) < 2


def _kind(tensor: torch.Tensor) -> str:
    """Return the shape of a tensor as text, and its type if it does not hold floats."""
    shape = f"{list(tensor.shape)}"
    return shape if tensor.is_floating_point() else f"{shape} {tensor.dtype}"


def _list_first(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    shown = [printable(f"{name:.160}") for name in names[:_SHOWN]]
    return ", ".join([*shown, f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else shown)


def run_folder(path: str) -> str:
    """Return the output folder of the run that a file of weights belongs to."""
    path = os.path.abspath(path)  # without a slash at its end
    folder = path if os.path.isdir(path) else os.path.dirname(path)
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
