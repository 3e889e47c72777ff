"""From the import of this module on, Ctrl-C ends a job with one line and exit code 130.

Importing torch takes seconds, and a Ctrl-C there would print a traceback of torch's own files. A job imports
this module first; common/exits.py takes over when main() begins. It imports nothing slow.
"""

import os
import signal

from common.exits import INTERRUPTED, say_error


def _end(number, frame):
    say_error("interrupted")
    os._exit(INTERRUPTED)  # nothing has begun that would have to end


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell starts background jobs without
    signal.signal(signal.SIGINT, _end)
