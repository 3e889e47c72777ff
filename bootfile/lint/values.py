"""The abstract values of a script: what an expression is, as far as its text shows it, and where it "
"comes from."""

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# kinds whose objects have a state that a restart needs
STATEFUL = ("model", "optimizer", "scheduler", "scaler", "ema", "generator")
# kinds that say nothing about a value
VAGUE = ("unknown", "none", "const")

_OPTIMIZERS = {
    "SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "LBFGS", "ASGD",
    "Rprop", "SparseAdam", "Adafactor", "Lion", "LAMB", "Lamb", "LARS", "Lookahead", "FusedAdam", "FusedSGD",
    "FusedLAMB", "BertAdam", "GaLoreAdamW", "AdamW8bit", "Adam8bit", "ZeroRedundancyOptimizer", "SAM", "Muon",
}  # fmt: skip
_NOISE = re.compile(r"^(DDPM|DDIM|PNDM|Euler|Heun|DPM|LMS|KDPM|UniPC|Flow|EDM|Score|Noise|Karras)|profiler")
_SCHEDULER = re.compile(r"(LR|Scheduler|_scheduler|ReduceLROnPlateau|WarmRestarts)$|get_\w+_schedule\w*$")
_SCALER = re.compile(r"GradScaler$|LossScaler$|NativeScaler\w*$")
_EMA = re.compile(
    r"^EMA|[a-z]EMA($|[A-Z])|^Ema[A-Z]|ModelEma\w*$|EmaModel$|MovingAverage$|AveragedModel$|^EMA$|Ema$"
)
_NOT_EMA = re.compile(r"Meter|Hook|Callback|Schema|Cinema")
_LOADER = re.compile(r"Data[Ll]oader\w*$")
_FACTORY = re.compile(
    r"^_?(create|get|build|make|configure|init|prepare|setup|select|define)_?", re.IGNORECASE
)
_MODEL_NAME = re.compile(
    r"^(model|net|network|backbone|generator|discriminator|encoder|decoder|critic|actor|agent|policy|unet|vae)"
    r"(_?\w{0,4})$|^net_?[A-Z]\w*$|_(model|net)$|^[GD]$"
)
WRAPPERS = {
    "DistributedDataParallel": "module.", "DDP": "module.", "DataParallel": "module.",
    "compile": "_orig_mod.",
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Value:
    """One abstract value. Two values are the same object if root() returns the same one.

    kind: "optimizer", "loader", "field" (read from a checkpoint), "unknown", ...
    label: its name in the script. path, line: where it was made. loops: the loops around that place.
    of: the object that a state, a wrapper or an attribute belongs to.
    key: of a field, or the value of a constant. offset: what was added to a number.
    parts: of a dict, list, or instance. deps: values from which it was computed.
    """

    kind: str = "unknown"
    label: str = ""
    path: str = ""
    line: int = 0
    of: "Value | None" = None
    key: Any = None
    offset: int = 0
    parts: dict[Any, "Value"] = field(default_factory=dict)
    is_open: bool = False
    deps: frozenset["Value"] = frozenset()
    loops: tuple["Loop", ...] = ()
    node: Any = None
    cls: Any = None
    flags: set[str] = field(default_factory=set)
    options: dict[Any, "Value"] = field(default_factory=dict)
    same: "Value | None" = None


@dataclass(eq=False, slots=True)
class Loop:
    """A loop of the script as it was run: of the same text there is one for each call of its function."""

    node: ast.AST
    path: str
    line: int
    value: Value | None = None
    start: Value | None = None
    iterated: Value | None = None
    function: str = ""
    test: "Value | None" = None


def root(value: Value) -> Value:
    """Return the object behind wrappers (DistributedDataParallel) and values that were found to be equal."""
    for _ in range(50):
        if value.same is not None:
            value = value.same
        elif value.kind == "wrapped" and value.of is not None:
            value = value.of
        else:
            return value
    return value


def kind_of(value: Value) -> str:
    return root(value).kind


def is_vague(value: Value) -> bool:
    """Return whether the script may know more of the object than this value tells."""
    return kind_of(value) in VAGUE


def list_deps(value: Value) -> set[Value]:
    """Return the value and all values from which it was computed."""
    seen: set[Value] = set()
    todo = [value]
    # a limit, because each event has such values: one may be made of thousands of others
    while todo and len(seen) < 400:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        todo += current.deps
        if current.same is not None:
            todo.append(current.same)
        if current.kind in ("state", "wrapped", "field", "attribute", "counter") and current.of is not None:
            todo.append(current.of)
    return seen


def is_restored(value: Value) -> bool:
    """Return whether a value comes from a checkpoint."""
    return any(dep.kind in ("field", "checkpoint") or "restored" in dep.flags for dep in list_deps(value))


def join_deps(values: Iterable[Value]) -> frozenset[Value]:
    """Return what a value depends on that is computed from these."""
    deps = [value for value in values if value.kind not in ("const", "none", "module", "function", "class")]
    return frozenset(deps[:20])


@functools.cache
def kind_of_class(dotted: str) -> str:
    """Return the kind of an object that a call of this name makes; "" if the name does not tell."""
    last = dotted.rpartition(".")[2]
    if last.endswith("State") or not last:
        return ""
    # diffusion models have schedulers of noise, which are not those of a learning rate
    if _SCHEDULER.search(last) and not _NOISE.search(last) and "sampl" not in last.lower():
        return "scheduler"
    if ".lr_scheduler." in dotted and last[0].isupper():
        return "scheduler"
    if _EMA.search(last) and not _NOT_EMA.search(last):
        return "ema"
    if last in _OPTIMIZERS or (".optim." in f".{dotted}" and last[0].isupper()):
        return "optimizer"
    if _SCALER.search(last):
        return "scaler"
    if _LOADER.search(last) and last[0].isupper():
        return "loader"
    if last.endswith("Sampler") and last[0].isupper():
        return "sampler"
    if dotted in ("torch.Generator", "numpy.random.RandomState", "numpy.random.default_rng", "random.Random"):
        return "generator"
    if dotted.startswith("torch.nn.") and last[0].isupper() and ".utils." not in dotted:
        return "criterion" if last.endswith("Loss") else "model"
    return ""


@functools.cache
def kind_of_factory(dotted: str) -> str:
    """Return the kind of what a function of another package makes, by its name; "" if that does not tell."""
    last = dotted.rpartition(".")[2].lower()
    if not _FACTORY.match(last):
        return ""
    if "sched" in last and "noise" not in last:
        return "scheduler"
    if "optim" in last:
        return "optimizer"
    if "loader" in last:
        return "loader"
    if last.endswith("sampler"):
        return "sampler"
    return ""


@functools.cache
def kind_of_name(name: str) -> str:
    """Return the kind of an object whose origin is not known, by its name; "" if that does not tell."""
    lower = name.lower()
    if "sched" in lower and "noise" not in lower and "sampl" not in lower:
        return "scheduler"
    if re.search(r"optim(izer)?s?(_?\w{1,4})?$|^opt$|^opt_\w$", lower) and "config" not in lower:
        return "optimizer"
    if lower in ("scaler", "grad_scaler", "loss_scaler"):
        return "scaler"
    if re.search(r"(^|_)ema($|_model$)|^model_ema$", lower):
        return "ema"
    if re.search(r"(checkpoint|ckpt)$", lower):
        return "checkpoint"
    if _MODEL_NAME.search(name):
        return "model"
    return ""
