"""Write --help of a parser with many options: those to begin with come first."""

import argparse
from collections.abc import Sequence

from bootfile.console.parser import Parser


def format_help(parser: Parser, first: Sequence[str], formatter: argparse.HelpFormatter) -> str:
    """Return the text of --help: a usage of one line, the first options, and the other options by group. Each
    option is shown once, so `--help | grep NAME` finds each.

    first: names of options without hyphens, with _ for -.
    """
    options = parser.by_name()
    beginning = [parser._option_string_actions[options[name]] for name in first]
    formatter.add_usage("%(prog)s [OPTION ...]", parser._actions, [])
    formatter.add_text(parser.description)
    formatter.start_section("options to begin with")
    formatter.add_arguments(beginning)
    formatter.end_section()
    for group in parser._action_groups:
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments([action for action in group._group_actions if action not in beginning])
        formatter.end_section()
    return formatter.format_help()
