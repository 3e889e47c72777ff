"""How a job ends: one clear line and an exit code.

0  done
2  bad input: an argument, a path or a file; nothing was written
1  anything else, with its traceback
"""

import functools
import os
import sys

BAD_INPUT = 2
ERROR_PIPE = (
    "BOOTFILE_ERROR_PIPE"  # file descriptor: the process that started this one prints a shared error once
)


class BadInput(ValueError):
    """Something from outside (argument, file, folder, network) is not usable. The message carries the
    values."""


def entry(main):
    """Decorate a job's main(): BadInput becomes one line `error: ...` on stderr and exit code 2."""

    @functools.wraps(main)
    def run():
        try:
            main()
        except BadInput as error:
            line = f"error: {' '.join(str(error).split())}\n"
            if ERROR_PIPE in os.environ:
                os.write(int(os.environ[ERROR_PIPE]), line.encode())
            else:
                sys.stderr.write(line)
            sys.exit(BAD_INPUT)

    return run
