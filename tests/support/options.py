"""Write the options in the documents from the parsers, as blocks of text.

    python -m tests.support.options      rewrite all blocks

A block is between `<!-- options: WHAT -->` and `<!-- end of options -->`. WHAT is

    jobs/train.py                              all options of a job
    jobs/train_ddp.py without jobs/train.py    those that the second does not have, or describes differently
    launch                                     each verb of `python -m launch`
    launch check                               what a verb does, and its options
"""

import argparse
import contextlib
import importlib
import io
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"cache": ("preload", "check", "ls", "rm")}
BLOCK = re.compile(r"(<!-- options: (.+?) -->\n).*?(<!-- end of options -->)", re.DOTALL)

_DEFAULT = re.compile(r"[ (;]*default: [^()]*\)?$")

Row = tuple[str, str, str]  # group, option with its value, help


def documents() -> list[Path]:
    """Return the documents of the repository that have options of the parsers."""
    names = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    return [ROOT / name for name in names if BLOCK.search((ROOT / name).read_text(encoding="utf-8"))]


def read_parsers(what: str = "--collect") -> dict[str, Any]:
    """Return the rows of each job and of each command of launch; under "verbs" what each verb does in a line,
    under "about" its whole description. what: "--paths" for the paths that they take."""
    command = [sys.executable, "-m", "tests.support.options", what]
    return json.loads(subprocess.check_output(command, cwd=ROOT, text=True))


def rewrite(text: str, parsers: dict[str, Any]) -> str:
    """Return the text with new blocks of options."""
    return BLOCK.sub(lambda found: found[1] + render(found[2], parsers) + found[3], text)


def render(what: str, parsers: dict[str, Any]) -> str:
    """Return the verbs, or the options of WHAT, as a block of text in the form of --help."""
    if what == "launch":
        verbs = [name for name in parsers if not name.endswith(".py") and name not in ("verbs", "about")]
        return _block(_line(name, parsers["verbs"].get(name, ""), 16) for name in verbs)
    verb = what.removeprefix("launch ")
    if verb != what:
        return _block([parsers["about"][verb], "", *_options(parsers[verb])])
    job, _, base = what.partition(" without ")
    known = {tuple(row[1:]) for row in parsers.get(base, ())}
    before = {(option, _DEFAULT.sub("", help)) for option, help in known}
    lines, last = [], ""
    for group, option, help in parsers[job]:
        if (option, help) in known:
            continue
        if group != last:
            lines += [f"{group}:"]
        if (option, _DEFAULT.sub("", help)) in before:  # only the default differs
            help = _DEFAULT.search(help)[0].strip(" ();")
        lines.append("  " + _line(option, help, 38))
        last = group
    return _block(lines)


def _options(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the options of a verb, without the groups."""
    return ["  " + _line(option, help, 30) for _, option, help in rows]


def _line(name: str, help: str, width: int) -> str:
    """Return a line of a block, with a default in brackets."""
    help = re.sub(r"\(default: ([^()]*)\)|^default: (.*)$", lambda found: f"[{found[1] or found[2]}]", help)
    return f"{name:{width}}  {help}"


def _block(lines: Iterable[str]) -> str:
    return "\n".join(["```text", *lines, "```"]) + "\n"


def _rows(parser: argparse.ArgumentParser) -> list[Row]:
    formatter: Any = parser._get_formatter()
    rows = []
    for group in parser._action_groups:
        for action in group._group_actions:
            if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
                continue
            named = bool(action.option_strings)
            metavar = formatter._get_default_metavar_for_optional(action) if named else action.dest
            value = "" if action.nargs == 0 else formatter._format_args(action, metavar)
            words = [", ".join(action.option_strings), value]
            rows.append((group.title or "", " ".join(filter(None, words)), formatter._expand_help(action)))
    return rows


def _paths(parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments of any text, and those of them that do not take ~ as the home folder."""
    texts = [each for each in parser._actions if each.nargs != 0 and not each.type and not each.choices]
    words = [f"{each.option_strings[0]}=~/x" if each.option_strings else "~/x" for each in texts]
    placed = [each for each in parser._actions if each.choices and not each.option_strings]
    parsed, _ = parser.parse_known_args([next(iter(each.choices)) for each in placed] + words)
    values = {each.dest: getattr(parsed, each.dest) for each in texts}
    values = {name: value[-1] if isinstance(value, list) else value for name, value in values.items()}
    return [*values, *(f"{name} is {value}" for name, value in values.items() if value.startswith("~"))]


def _collect(read: Callable[[argparse.ArgumentParser], list[Any]] = _rows) -> dict[str, Any]:
    """Run the jobs and the verbs until they print their help, in this process. read: its argument is the
    parser."""
    found: dict[str, Any] = {}
    about = {}
    now = ""

    def note(parser: argparse.ArgumentParser, file: object = None) -> None:
        found[now] = read(parser)
        about[now] = (parser.description or "").strip()

    argparse.ArgumentParser.print_help = note  # type: ignore[method-assign, assignment]
    sys.argv = ["", "--help"]
    from launch.__main__ import VERBS

    for job in sorted((ROOT / "jobs").glob("*.py")):
        now = sys.argv[0] = f"jobs/{job.name}"
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(job), run_name="__main__")
    meanings = {verb: meaning for verb, (_, meaning) in VERBS.items()}
    for verb, (module, _) in VERBS.items():
        page = importlib.import_module(module)
        for now in [f"{verb} {part}" for part in PARTS.get(verb, ())] or [verb]:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                page.main([*now.split()[1:], "--help"])
            line = re.search(rf"launch {now} .*?  +(\S.*)", page.__doc__ or "") if verb in PARTS else None
            meanings[now] = line[1] if line else meanings[verb]
    return found | {"verbs": meanings, "about": about}


def main(arguments: list[str]) -> None:
    if arguments in (["--collect"], ["--paths"]):
        print(json.dumps(_collect(_rows if arguments == ["--collect"] else _paths)))
        return
    parsers = read_parsers()
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if (new := rewrite(text, parsers)) != text:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
