"""Parse the command lines of jobs as platforms send them: "true" and "false", extra options, intervals.

A Parser takes the words of a command line and gives Arguments, which are read only: each value is checked
here, by the type of its option, with the value and what is expected. A check of several options is one of
the checks of a JobParser (common/run/run.py). Behind them no code asks again. A part of a job that reads an
option which only some jobs have reads vars(args).get(name).
"""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from bootfile.console import parser
from bootfile.console.parser import LARGEST
from bootfile.console.parser import boolean as boolean  # jobs import the types of their options from here
from bootfile.console.parser import non_negative_float as non_negative_float
from bootfile.console.parser import non_negative_int as non_negative_int
from bootfile.console.parser import positive_float as positive_float
from bootfile.console.parser import positive_int as positive_int
from bootfile.exact.due import Interval
from bootfile.ground.errors import BadInput
from bootfile.ground.secrets import hide, is_secret, mask
from common.ground.files import is_url

BATCH_SIZE_HELP = "samples of a step over all processes, N/gpu: of each; scale --lr (default: %(default)s)"

REMOVED = {  # former options
    "stage": "removed: data at a URL are always copied to the node",
    "scan": "removed: every file is read once, and the index is kept in --cache_dir",
    "rank_level": "removed: --rank counts nodes; to start each process yourself, use torchrun",
    "bn_weight_decay": "removed: norms and biases do not decay; change optimizers.build() in a copy",
    "sample_weights": "removed: use --class_weights FILE",
    "upload_timeout": "removed: the last upload to a URL is repeated for 300 s, after a signal for --grace",
    "antialias": "removed: images are always resized with antialiasing; --pack loads them faster",
    "optimizer_kwargs": "removed: in a copy, optimizers.build(args, model, device, betas=(0.9, 0.95))",
    "gradient_compression": "removed: in a copy, forward.register_comm_hook(None, bf16_compress_hook)",
    "batch_size_per_gpu": "removed: use --batch_size N/gpu",
    "partial_weights": "removed: use --weights FILE,partial",
    "checkpoint_activations": "removed: use --grad_checkpointing",
}
_OTHER_NAMES = {"learning_rate": "lr", "bs": "batch_size", "wd": "weight_decay"}  # difflib misses these

_FOLDERS = ("data_url", "output_dir")  # options that take a folder or a URL
_PLACES = {"FILE", "FOLDER", "DIR", "PATH", "RUN", "URL"}  # words of a metavar

# Roles of options. Of others another value may change the training: its schedule must permit it.
IDENTITY = "identity"  # another value is another run, whose checkpoints are refused
OPERATION = "operation"  # it may change at a restart


class Arguments(argparse.Namespace):
    """The options of a job, and nothing else. They are read only once the parser has returned them."""

    __slots__ = ("ignored", "roles")  # not in vars()

    def finish(self, roles: Mapping[str, str], ignored: Sequence[str] = ()) -> "Arguments":
        """Set the role of each option, and the names of options that the job does not know. From now on the
        options are read only."""
        self.ignored = ignored
        self.roles = roles  # at the end: the options are read only when they have roles
        return self

    def replaced(self, values: Mapping[str, Any]) -> "Arguments":
        """Return the options with other values."""
        return Arguments(**{**vars(self), **values}).finish(self.roles, self.ignored)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "roles"):
            raise AttributeError(f"args.{name} = {value!r}: the options are read only; use a variable")
        super().__setattr__(name, value)


class secret(str):
    """A value that no log, record or report shows: parser.add_argument("--name", type=secret)."""

    def __new__(cls, text: str) -> "secret":
        hide(text)
        return super().__new__(cls, text)


def settings(args: argparse.Namespace) -> dict[str, str | int | float | bool | None]:
    """Return the arguments that may be logged: plain values, without any that is a credential. starts.jsonl
    has them, and each checkpoint as its `arguments`."""
    shown: dict[str, str | int | float | bool | None] = {}
    for name, value in vars(args).items():
        is_text = isinstance(value, str | PurePath | Interval)
        # a value of another class is left out: checkpoints and starts.jsonl have plain values only
        if (is_text or isinstance(value, int | float | bool | None)) and not _is_credential(name, value):
            shown[name] = mask(str(value)) if is_text else value  # a URL may have a password
    return shown


def _is_credential(name: str, value: object) -> bool:
    """Return whether an option has the type `secret`, or a name or a value that looks like a credential."""
    return isinstance(value, secret) or is_secret(name, value)


def identity(args: Arguments) -> dict[str, Any]:
    """Return the options that identify a run, --name -> plain value, without credentials: those with the role
    IDENTITY. A checkpoint with other values is refused."""
    shown = settings(args)
    values: dict[str, Any] = {}
    for name, value in vars(args).items():
        if args.roles.get(name) != IDENTITY or _is_credential(name, value):
            continue
        if isinstance(value, list | tuple):
            values[f"--{name}"] = [str(part) if isinstance(part, PurePath) else part for part in value]
        else:  # str: of a class of the job
            values[f"--{name}"] = shown.get(name, str(value))
    return values


def without_operation(args: Arguments, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options that may change the training."""
    return {name: value for name, value in values.items() if args.roles.get(name) != OPERATION}


# An option whose value may be left out for true: parser.add_argument(name, **FLAG).
FLAG: dict[str, Any] = {"type": boolean, "nargs": "?", "const": True, "default": False}


def seed(text: str) -> int:
    """Parse an integer in 0..2^63-1, the range that both torch.manual_seed and NumPy accept."""
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in 0..2^63-1")
    return int(text)


def interval(text: str) -> Interval:
    """Parse "200" (steps), "90s" or "1epoch"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|epochs?|steps?)?", text, re.ASCII)
    count = float(match[1]) if match else 0.0
    unit = (match and match[2]) or "step"
    unit = unit if unit == "s" else unit.removesuffix("s")
    # a step and an epoch are whole, seconds may have a fraction
    if not 0 < count <= LARGEST or (unit != "s" and count % 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps (200), seconds (90s) or epochs (1epoch), at most {LARGEST:g}"
        )
    return Interval(count, unit)


class _HelpFormatter(parser.HelpFormatter):
    """Shows the expected value of an option (`N`, `FOLDER|URL`) if it has no metavar of its own."""

    metavars = MappingProxyType({**parser.HelpFormatter.metavars, seed: "N", interval: "N|Ns|Nepochs"})

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        is_folder = action.dest in _FOLDERS
        return "FOLDER|URL" if is_folder else super()._get_default_metavar_for_optional(action)


def _role_of_new(role: str | None, role_of_group: str, options: Mapping[str, Any]) -> str:
    """Return the role of an option that is added. role: that of the option, None if it names none."""
    kind = options.get("type")
    # of a path the digest of the training data says whether the files are the same
    is_path = isinstance(kind, type) and issubclass(kind, PurePath)
    default = OPERATION if is_path else role_of_group
    return default if role is None else role


class _Group(argparse._ArgumentGroup):
    """A group of options that have the same role, unless an option names its own or is a Path."""

    def __init__(self, parser: "Parser", *arguments: Any, role: str = "", **options: Any):
        super().__init__(parser, *arguments, **options)
        self._roles = parser.roles
        self._role = role

    def add_argument(self, *names: str, role: str | None = None, **options: Any) -> argparse.Action:  # type: ignore[override]
        action = super().add_argument(*names, **options)
        self._roles[action.dest] = _role_of_new(role, self._role, options)
        return action


class Parser(parser.Parser):
    """A Parser whose options may have roles, and whose folders and files are not URLs.

    An option or a group may have a role, IDENTITY or OPERATION: add_argument("--seed", role=IDENTITY). An
    option of the type pathlib.Path is OPERATION if it names no role: it says where files are.
    first: names of the options with which --help begins, if the parser has many.
    """

    formatter = _HelpFormatter
    short_names = MappingProxyType(_OTHER_NAMES)
    hints: Mapping[str, str] = MappingProxyType(REMOVED)
    first: Sequence[str] = ()

    def __init__(self, description: str | None, prog: str | None = None):
        self.roles: dict[str, str] = {}  # option -> IDENTITY, OPERATION or ""
        super().__init__(description, prog)

    def add_argument(self, *names: str, role: str | None = None, **options: Any) -> argparse.Action:  # type: ignore[override]
        action = super().add_argument(*names, **options)
        self.roles[action.dest] = _role_of_new(role, "", options)
        return action

    def add_argument_group(self, *arguments: Any, **options: Any) -> _Group:
        group = _Group(self, *arguments, **options)
        self._action_groups.append(group)
        return group

    def format_help(self) -> str:
        """Return the text of --help: all options, each once, so that `--help | grep NAME` finds it. If some
        come first: a usage of one line, these, and the others by group."""
        if not self.first:
            return super().format_help()
        options = self.by_name()
        beginning = [self._option_string_actions[options[name]] for name in self.first]
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s [OPTION ...]", self._actions, [])
        formatter.add_text(self.description)
        formatter.start_section("options to begin with")
        formatter.add_arguments(beginning)
        formatter.end_section()
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments([action for action in group._group_actions if action not in beginning])
            formatter.end_section()
        return formatter.format_help()

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the namespace and the names of the unknown options. Raises BadInput if a folder or a file of
        this machine is a URL, or empty."""
        parsed, unknown = super().parse_known_args(args, namespace)
        for action in self._actions:
            value: Any = getattr(parsed, action.dest, None)  # --config is not among them if it is not given
            if is_url(value) or (value == "" and action.default != ""):
                _check_place(action, value)
        return parsed, unknown


def _check_place(action: argparse.Action, value: str) -> None:
    """Raise BadInput for an empty value of an option that names a file, a folder or a run, as of "$WEIGHTS"
    if the variable of the shell is not set, and for a URL in place of a path of this machine."""
    expected = str(action.metavar or ("FOLDER|URL" if action.dest in _FOLDERS else ""))
    if not value and not _PLACES.isdisjoint(re.findall("[A-Z]+", expected)):
        reason = f"'' is empty: expected {expected}, or leave it out"
        raise BadInput(str(argparse.ArgumentError(action, reason)))
    # a folder `s3:` would be made
    if is_url(value) and expected.partition(".")[0] in ("FOLDER", "FILE"):
        name = action.option_strings[-1] if action.option_strings else expected.partition(".")[0]
        raise BadInput(f"{name} {value}: expected a path of this machine, got a URL")
