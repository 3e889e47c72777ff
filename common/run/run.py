"""The command line of a job, and what it opens: its place among the processes, its device, its output folder
and its log."""

import argparse
import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bootfile.console.parser import plain
from bootfile.ground.errors import BadInput, import_optional, print_line
from common.console.arguments import FLAG, Arguments, Parser, settings
from common.distributed import devices
from common.ground.files import HOME
from common.platform import place
from common.platform.signs import INJECTED, MEMBER
from common.platform.topology import Topology
from common.run.log import Log
from common.run.output import Output, open_output

_GRACE = 5.0  # seconds from a signal to the end of the processes, of a job that saves nothing


class JobParser(Parser):
    """The Parser of a job. Options that a platform adds are ignored, with one printed line.

    checks: functions that are called with the parsed arguments. Each returns the arguments that follow from
    others, name -> value, or raises BadInput.
    """

    def __init__(self, description: str | None):
        super().__init__(description)
        self.checks: list[Callable[[argparse.Namespace], Mapping[str, Any]]] = []

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Return the Arguments of a command line. Raises BadInput, also for unknown options that are not
        ignored."""
        help = "options as NAME = VALUE; those of the command line come first"
        self.add_argument("--config", metavar="FILE.toml", default=argparse.SUPPRESS, help=help)
        self.add_argument("--ignore_unknown", **FLAG, help="true: ignore unknown options")
        if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions: print them and exit
            import_optional("argcomplete", "completion in a shell needs argcomplete").autocomplete(self)
        words = list(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args(words, Arguments())
        # the words of the file come first, so that those of the command line count
        if "config" in parsed:
            words = self._read_config(parsed.config) + words
            parsed, unknown = self.parse_known_args(words, Arguments())
        # once more with defaults that depend on other options: what the user has given still counts
        if defaults := self.read_defaults(parsed):
            self.set_defaults(**{name: value for name, value in defaults.items() if name in parsed})
            parsed, unknown = self.parse_known_args(words, Arguments())
        if not parsed.__dict__.pop("ignore_unknown"):
            self._check_unknown(unknown)
        if place.is_first_on_node():
            if counters := place.describe_starts(os.environ):
                print_line(f"starts {counters}")
            if unknown:
                print_line(f"ignored arguments: {' '.join(unknown)}")
            shown = settings(parsed)  # without credentials
            given = [name for name, value in shown.items() if str(value) != str(self.get_default(name))]
            words_shown = [f"{name}={shown[name]}" for name in given]
            print_line(f"settings {' '.join(words_shown) or '(all defaults)'}")
        # when all options are known; each process does it, before anything is opened
        for check in self.checks:
            vars(parsed).update(check(parsed))
        return parsed.finish(self.roles, unknown)

    def read_defaults(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Return defaults that follow from the options, name -> value. Raises BadInput."""
        return {}

    def _read_config(self, path: str) -> list[str]:
        """Return the settings of a TOML or JSON file as words of a command line. Raises BadInput, also if a
        key is not an option."""
        from common.console import config  # most jobs get no file

        if not os.path.exists(path) and os.path.exists(os.path.join(HOME, path)):
            path = os.path.join(HOME, path)  # a platform may start the job in any folder
        options = {name: self._option_string_actions[option] for name, option in self.by_name().items()}
        try:
            words = config.to_words(config.read(path), options)
            _, unknown = self.parse_known_args(words)
            if unknown:
                self.error(self.unknown(unknown))
        except BadInput as error:
            raise BadInput(f"--config {path}: {error}") from error.__cause__
        return words

    def _check_unknown(self, unknown: list[str]) -> None:
        """Raise BadInput if one of the unknown options may not be ignored. Options that platforms inject are
        always ignored. A platform may add others of its own: there an unknown option is refused only if it
        looks like a mistake of the user, because it resembles an option of the parser or is a former one."""
        options = {plain(word.partition("=")[0]) for word in sys.argv[1:] if word.startswith("-")}
        refused = [name for name in unknown if plain(name) not in INJECTED]
        if place.recognised(os.environ) or options & INJECTED - {"local_rank"}:
            refused = [name for name in refused if self.resembling(name) or plain(name) in self.hints]
        if refused:
            self.error(f"{self.unknown(refused)}; --ignore_unknown true ignores them")


class Run:
    """A run of a job, as this process sees it. Each process makes one when its options are parsed, before it
    reads data or joins the others.

    args: the options of a JobParser. topology: the processes of the job, and the place of this one.
    device: the GPU of this process, or the CPU. output: the folder of the results. log: of the reports.
    Raises BadInput; nothing is left on the disk then.
    """

    def __init__(self, args: Arguments):
        self.args = args
        # the order matters: the device needs the rank, and only rank 0 opens a new folder
        self.topology: Topology = devices.find_topology(args)
        if MEMBER in os.environ:  # an agent has started this process
            from common.elastic.members import this_process  # most jobs are not elastic

            self.topology = dataclasses.replace(self.topology, members=this_process())
        self.device: torch.device = devices.select(args, self.topology)
        self.output: Output = open_output(args, self.topology)
        self.log = Log(args, self.output)

    def replaced(self, values: Mapping[str, Any]) -> "Run":
        """Return a copy with other values of its options. Call it before anything is printed or written."""
        run = copy.copy(self)
        run.args = self.args.replaced(values)
        run.log = Log(run.args, self.output)
        return run

    def print_topology(self) -> Topology:
        """Return the topology. The first process of each node prints it, and the preflight report of the
        node. Raises BadInput."""
        from common.platform import node  # a job of one process does not need it

        if place.is_first_on_node():
            print_line(str(self.topology))
            node.print_findings(self.args, self.topology, self.output.folder)
        return self.topology

    def join(self) -> tuple[int, int]:
        """Return (rank, world_size) of this process, with torch.distributed initialised; all wait for each
        other. If the platform started one process per node, this one starts the node's processes, waits for
        them, and exits with their exit code. Raises BadInput and NoRendezvous."""
        from common.distributed import launcher, process_group

        topology = self.print_topology()
        # this process trains nothing: it waits for its children, which run the same main()
        if topology.starts_processes:
            sys.exit(launcher.start(topology, vars(self.args).get("grace", _GRACE)))
        # all ranks of the job wait here for the last one
        torch.distributed.init_process_group(**process_group.meet(self.args, topology))
        return topology.rank, topology.world_size
