"""The command `bootfile`: find restart bugs, prove that a training continues exactly, compare runs."""

import importlib
import sys
from collections.abc import Callable, Collection

from bootfile import __version__
from bootfile.ground.errors import BAD_INPUT, INTERRUPTED, BadInput, say_error
from bootfile.ground.secrets import mask

VERBS = {  # verb: (module with main(arguments) -> exit code, what it does)
    "lint": (
        "bootfile.lint.cli",
        "find restart bugs in a training script, in a second, without running it",
    ),
    "fix": (
        "bootfile.fix.cli",
        "repair what lint finds: print a diff, or change the script",
    ),
    "prove": (
        "bootfile.prove.cli",
        "run a training script with kills and restarts, and show whether it continues exactly",
    ),
    "receipt": (
        "bootfile.receipt.cli",
        "compare the data and the states of two runs; show the first step that differs",
    ),
}
USAGE = "\n".join(
    [
        "usage: bootfile VERB [ARGUMENTS]   (VERB --help: details; --version)",
        "",
        *(f"  {verb:<10}{meaning}" for verb, (_, meaning) in VERBS.items()),
    ]
)


def main() -> int:
    """Run the verb of the command line, and return the exit code."""
    verb, *arguments = sys.argv[1:] or [""]
    if verb in ("-h", "--help", "--version"):
        print(f"bootfile {__version__}" if verb == "--version" else USAGE)
        return 0
    if not verb:
        print(USAGE, file=sys.stderr)
        return BAD_INPUT
    if verb not in VERBS:
        say_error(describe_unknown(verb, VERBS))
        return BAD_INPUT
    try:
        # the module of a verb is imported only now: a wrong verb does not wait for torch
        return run_verb(verb, VERBS[verb][0], arguments)
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED
    except BadInput as error:
        say_error(mask(str(error)))
        return error.code


def describe_unknown(verb: str, verbs: Collection[str]) -> str:
    """Return an error line for a verb that does not exist: the verb that was meant, or all of them."""
    import difflib  # only after an error

    meant = difflib.get_close_matches(verb.lower(), verbs, 1)
    hint = f"did you mean {meant[0]}?" if meant else f"expected {', '.join(verbs)}"
    return f"unknown command {verb!r}: {hint}"


def run_verb(verb: str, module: str, arguments: list[str]) -> int:
    """Run main(arguments) of a module, and return its exit code. Raises BadInput, also for files and names
    that the verb cannot use."""
    try:
        main_of_verb: Callable[[list[str]], int] = importlib.import_module(module).main
        return main_of_verb(arguments)
    except (OSError, RuntimeError) as error:
        from bootfile.machine import process_limits  # only after an error

        line = process_limits.explain(error)
        if line:
            raise BadInput(f"{verb}: {line}") from error
        if not isinstance(error, OSError):
            raise
        # of a path, or of a folder that is needed to work; a verb names most itself
        place = f"{error.filename}: " if error.filename is not None else ""
        raise BadInput(f"{verb}: {place}{error.strerror or error}") from error
    except UnicodeError as error:
        raise BadInput(f"{verb}: a file or a name is not UTF-8: {error}") from error
