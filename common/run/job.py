"""Parse the command line of a job on any platform."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bootfile.console.parser import plain
from bootfile.ground.errors import BadInput, import_optional, print_line
from common.console import config
from common.console.arguments import FLAG, Arguments, Parser, settings
from common.ground.files import HOME
from common.platform import platforms
from common.platform.table import INJECTED


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
        ignored = self._let_pass(unknown, parsed.__dict__.pop("ignore_unknown"))
        if platforms.is_first_on_node():
            if counters := platforms.describe_starts(os.environ):
                print_line(f"starts {counters}")
            if ignored:
                print_line(f"ignored arguments: {' '.join(ignored)}")
            shown = []
            for name, value in settings(parsed).items():  # without credentials
                if str(value) != str(self.get_default(name)):
                    shown.append(f"{name}={value}")
            print_line(f"settings {' '.join(shown) or '(all defaults)'}")
        # when all options are known; each process does it, before anything is opened
        for check in self.checks:
            vars(parsed).update(check(parsed))
        return parsed.finish(self.roles, ignored)

    def read_defaults(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Return defaults that follow from the options, name -> value. Raises BadInput."""
        return {}

    def _read_config(self, path: str) -> list[str]:
        """Return the settings of a TOML or JSON file as words of a command line. Raises BadInput, also if a
        key is not an option."""
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

    def _let_pass(self, unknown: list[str], everything: bool) -> list[str]:
        """Return the unknown options if all of them may be ignored, otherwise raise BadInput. Options that
        platforms inject are always ignored. On a platform an unknown option is also ignored if it resembles
        no option of the parser and no former one. everything: ignore all."""
        options = {plain(word.partition("=")[0]) for word in sys.argv[1:] if word.startswith("-")}
        on_platform = platforms.recognised(os.environ) or bool(options & INJECTED - {"local_rank"})
        refused = []
        for name in unknown:
            # a platform may add options of its own: only what looks like a mistake of the user is refused
            is_mistake = not on_platform or self.resembling(name) or plain(name) in self.hints
            if is_mistake and plain(name) not in INJECTED:
                refused.append(name)
        if refused and not everything:
            self.error(f"{self.unknown(refused)}; --ignore_unknown true ignores them")
        return unknown
