"""The command line of the programs that judge one receipt and compare two."""

import argparse
import os
from typing import NoReturn

from bootfile.receipt.one_run import Options
from bootfile.receipt.records import ReceiptError


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ReceiptError(message)


def parse(
    words: list[str],
    description: str | None,
    program: str | None = None,
) -> tuple[list[str], Options]:
    """Return (one or two folders of runs, the options of one run).

    words: the arguments of the program. description, program: of the help; None: the name of the file.
    Raises ReceiptError.
    """
    parser = _Parser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", type=os.path.expanduser, help="folders of one or two runs")
    add("--repeats", action="store_true", help="one run: samples may come twice in an epoch, or on two ranks")
    add("--same_order", "--same-order", action="store_true", help="one run: epochs may have the same order")
    add("--augmented", action="store_true", help="one run: samples may not look the same in two epochs")
    arguments = vars(parser.parse_args(words))
    folders: list[str] = arguments.pop("runs")
    if len(folders) not in (1, 2):
        raise ReceiptError(f"expected RUN or RUN_A RUN_B, got {len(folders)} folders")
    options = Options(**arguments)
    if len(folders) == 2 and any(options):
        raise ReceiptError("--repeats, --same_order and --augmented are about one run")
    return folders, options
