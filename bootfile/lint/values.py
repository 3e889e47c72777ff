"""The abstract values of a script: what an expression is, as far as its text shows it, and where it comes
from."""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# kinds whose objects have a state that a restart needs
STATEFUL = ("model", "optimizer", "scheduler", "scaler", "ema", "generator")
# kinds that say nothing about a value
VAGUE = ("unknown", "none", "const")
_MAKES_NUMBER = re.compile(r"^(torch|numpy)\.(tensor|array|zeros|ones|full|float\d+)$")
# numbers that a loop counts
NUMBERS = ("loop", "counter", "shifted")

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
    """A loop of the script as it was run: of the same text there is one for each call of its function.
    depth, calls: the number of conditions and of functions around it."""

    node: Any
    path: str
    line: int
    value: Value | None = None
    start: Value | None = None
    iterated: Value | None = None
    function: str = ""
    depth: int = 0
    calls: int = 0
    test: "Value | None" = None


def root(value: Value) -> Value:
    """Return the object behind wrappers (DistributedDataParallel) and values that were found to be equal."""
    for _ in range(50):
        inner = value.same or (value.of if value.kind == "wrapped" else None)
        if inner is None:
            break
        value = inner
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
        of = current.of if current.kind in ("state", "wrapped", "field", "attribute", "counter") else None
        todo += [*current.deps, *filter(None, (current.same, of))]
    return seen


def is_start(value: Value, depth: int = 0) -> bool:
    """Return whether a number is the one that a script writes or an option gives: the same at each start."""
    if value.kind == "unknown":
        is_made = "from_call" not in value.flags or _MAKES_NUMBER.search(str(value.key)) is not None
        is_known = is_made and value.label != "" and "undefined" not in value.flags and depth < 4
        return is_known and all(is_start(dep, depth + 1) for dep in value.deps)
    return value.kind in ("none", "option") or (value.kind == "const" and not isinstance(value.key, str))


def is_restored(value: Value) -> bool:
    """Return whether a value comes from a checkpoint."""
    return any(dep.kind in ("field", "checkpoint") or "restored" in dep.flags for dep in list_deps(value))


def join_deps(values: Iterable[Value]) -> frozenset[Value]:
    """Return what a value depends on that is computed from these: a constant only if it has a name, because
    the loop may change what that holds."""
    kinds = ("const", "none", "module", "function", "class")
    deps = [value for value in values if value.kind not in kinds or (value.label and value.kind in VAGUE)]
    return frozenset(deps[:20])


class Named(NamedTuple):
    """A row of a table of names: one that `pattern` matches, and `but` does not, is that of the kind."""

    kind: str
    pattern: str
    but: str = "$^"


# names of classes and functions, with their package: ".torch.optim.SGD"
CLASSES = [
    Named("", r"(State|\.)$"),
    # diffusion models have schedulers of noise, which are not those of a learning rate
    Named("scheduler", r"(LR|Scheduler|_scheduler|ReduceLROnPlateau|WarmRestarts)$|get_\w+_schedule\w*$",
          r"\.(DDPM|DDIM|PNDM|Euler|Heun|DPM|LMS|KDPM|UniPC|Flow|EDM|Score|Noise|Karras)\w*$"
          r"|(profiler|(?i:sampl))\w*$"),
    Named("scheduler", r"\w\.lr_scheduler\.(.*\.)?[A-Z]\w*$"),
    Named("ema", r"\.EMA\w*$|[a-z]EMA([A-Z]\w*)?$|\.Ema[A-Z]\w*$|ModelEma\w*$"
          r"|(EmaModel|MovingAverage|AveragedModel|Ema)$", r"(Meter|Hook|Callback|Schema|Cinema)\w*$"),
    Named("optimizer", r"\.(SGD|Adam(W|ax)?|Ada(grad|delta|factor)|[NR]Adam|LBFGS|ASGD|Rprop|SparseAdam"
          r"|RMSprop|Lion|LAMB|Lamb|LARS|Lookahead|Fused(Adam|SGD|LAMB)|BertAdam|GaLoreAdamW|AdamW?8bit"
          r"|ZeroRedundancyOptimizer|SAM|Muon)$|\.optim\.(.*\.)?[A-Z]\w*$"),
    Named("scaler", r"(GradScaler|LossScaler|NativeScaler\w*)$"),
    Named("loader", r"\.(?=[A-Z])\w*Data[Ll]oader\w*$"),
    Named("sampler", r"\.(?=[A-Z])\w*Sampler$"),
    Named("generator", r"^\.(torch\.Generator|numpy\.random\.(RandomState|default_rng)|random\.Random)$"),
    Named("criterion", r"^\.torch\.nn\.(.*\.)?(?=[A-Z])\w*Loss$", r"\.utils\."),
    Named("model", r"^\.torch\.nn\.(.*\.)?[A-Z]\w*$", r"\.utils\."),
]  # fmt: skip
# names of functions of another package that make an object: build_optimizer()
FACTORIES = [
    Named("scheduler", r"(?i)sched", r"(?i)noise"),
    Named("optimizer", r"(?i)optim"),
    Named("loader", r"(?i)loader"),
    Named("sampler", r"(?i)sampler$"),
]
_FACTORY = re.compile(
    r"^_?(create|get|build|make|configure|init|prepare|setup|select|define)_?", re.IGNORECASE
)
# names of objects whose origin is not known
NAMES = [
    Named("scheduler", r"(?i)sched", r"(?i)noise|sampl"),
    Named("optimizer", r"(?i)optim(izer)?s?(_?\w{1,4})?$|^opt$|^opt_\w$", r"(?i)config"),
    Named("scaler", r"(?i)^(grad_|loss_)?scaler$"),
    Named("ema", r"(?i)(^|_)ema($|_model$)|^model_ema$"),
    Named("checkpoint", r"(?i)(checkpoint|ckpt)$"),
    Named("model", r"^(model|net|network|backbone|generator|discriminator|encoder|decoder|critic|actor|agent"
          r"|policy|unet|vae)(_?\w{0,4})$|^net_?[A-Z]\w*$|_(model|net)$|^[GD]$"),
]  # fmt: skip


def _look_up(rows: Sequence[Named], name: str) -> str:
    fitting = (row.kind for row in rows if re.search(row.pattern, name) and not re.search(row.but, name))
    return next(fitting, "")


@functools.cache
def kind_of_class(dotted: str) -> str:
    """Return the kind of an object that a call of this name makes; "" if the name does not tell."""
    return _look_up(CLASSES, f".{dotted}")


@functools.cache
def kind_of_factory(dotted: str) -> str:
    """Return the kind of what a function of another package makes, by its name; "" if that does not tell."""
    last = dotted.rpartition(".")[2]
    return _look_up(FACTORIES, last) if _FACTORY.match(last) else ""


@functools.cache
def kind_of_name(name: str) -> str:
    """Return the kind of an object whose origin is not known, by its name; "" if that does not tell."""
    return _look_up(NAMES, name)
