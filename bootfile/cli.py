"""The command `bootfile`: find restart bugs, prove that a training continues exactly, compare runs."""

import importlib
import sys
from collections.abc import Callable

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


def main() -> int:
    """Run the verb of the command line, and return the exit code."""
    try:
        return run("bootfile", VERBS)
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED
    except BadInput as error:
        say_error(mask(str(error)))
        return error.code


def run(program: str, verbs: dict[str, tuple[str, str]]) -> int:
    """Run the verb of the command line, one of these of a program, and return the exit code: also of
    `python -m launch`. Raises BadInput."""
    verb, *arguments = sys.argv[1:] or [""]
    if verb == "--version":
        print(f"bootfile {__version__}")
        return 0
    if verb in ("", "-h", "--help"):
        print(
            f"usage: {program} VERB [ARGUMENTS]   (VERB --help: details; --version)\n",
            *(f"  {name:<10}{meaning}" for name, (_, meaning) in verbs.items()),
            sep="\n",
            file=sys.stdout if verb else sys.stderr,
        )
        return 0 if verb else BAD_INPUT
    if verb not in verbs:
        import difflib  # only after an error

        meant = difflib.get_close_matches(verb.lower(), verbs, 1)
        hint = f"did you mean {meant[0]}?" if meant else f"expected {', '.join(verbs)}"
        raise BadInput(f"unknown command {verb!r}: {hint}")
    # the module of a verb is imported only now: a wrong verb does not wait for torch
    return run_verb(verb, verbs[verb][0], arguments)


def run_verb(verb: str, module: str, arguments: list[str]) -> int:
    """Run main(arguments) of a module, and return its exit code. Raises BadInput, also for files and names
    that the verb cannot use."""
    try:
        main_of_verb: Callable[[list[str]], int] = importlib.import_module(module).main
        return main_of_verb(arguments)
    except (OSError, RuntimeError) as error:
        from bootfile.machine import process_limits  # only after an error

        if line := process_limits.explain(error):
            raise BadInput(f"{verb}: {line}") from error
        if not isinstance(error, OSError):
            raise
        # of a path, or of a folder that is needed to work; a verb names most itself
        place = f"{error.filename}: " if error.filename is not None else ""
        raise BadInput(f"{verb}: {place}{error.strerror or error}") from error
    except UnicodeError as error:
        raise BadInput(f"{verb}: a file or a name is not UTF-8: {error}") from error
