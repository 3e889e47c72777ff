"""Wrap the main() of a job: it ends with one line and an exit code, also after Ctrl-C.

A job imports this module before torch: importing torch takes seconds, and a Ctrl-C then would print a
traceback of torch's files.
"""

import atexit
import contextlib
import functools
import gc
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from bootfile.ground.errors import BAD_INPUT, INTERRUPTED, BadInput, leave, write_error
from bootfile.ground.secrets import mask
from bootfile.machine import levels
from bootfile.processes import signals
from common.ground import endings
from common.ground.endings import format_traceback, say_error, say_traceback

endings.protect_output()  # at once: the imports of a job open files
_THRESHOLDS = gc.get_threshold()
_MANY = 10**6  # new objects before the next search for garbage
# torch makes 350,000 objects when it is imported, and all stay: searching them again and again takes a second
if "torch" not in sys.modules:
    gc.set_threshold(_MANY)
_written: int | None = 0  # bytes on standard error when main() had raised an error
main_of_job = ""  # the name of the function that entry() decorates; forks of an elastic job run it
# packages of this repository: if one of their modules is missing, it is a defect
_OURS = ("", "bootfile", "common", "datasets", "launch", "jobs")


def entry(main: Callable[[], object]) -> Callable[[], None]:
    """Decorate a job's main(): BadInput and Ctrl-C become one line `error: ...` and an exit code."""
    global main_of_job
    main_of_job = main.__name__
    # the job has imported its modules: from now on a search visits only new objects, also at the end
    if gc.get_threshold()[0] == _MANY:
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)

    @functools.wraps(main)
    def run_main() -> None:
        run(main)

    return run_main


def run(main: Callable[[], object]) -> None:
    """Run a main(), and end the process as entry() says. A main() that returns ends it too, if it has joined
    a process group. Every process of a job calls it: through entry(), or after a fork of an elastic job."""
    global _written
    try:
        # until the training watches its signals: Ctrl-C while data are prepared raises KeyboardInterrupt
        signals.end_on_interrupt()
        try:
            main()
        except BadInput:
            raise
        except Exception as error:
            # a known cause, such as data, options or a limit, is one line; any other error keeps its
            # traceback
            reason = endings.explain(error) or _explain_missing_package(error)
            if not reason:
                raise
            raise BadInput(reason) from error
        # main() has returned: the log, the loaders and the group of processes are closed here
        endings.end(None)
    except KeyboardInterrupt as error:
        say_error("interrupted")
        endings.end(error)
        leave(INTERRUPTED)
    except BadInput as error:
        say_error(str(error))
        in_group = endings.in_group()
        endings.end(error)
        if error.code == BAD_INPUT and not in_group:  # no other process can block the exit
            sys.exit(error.code)
        leave(error.code)
    except SystemExit as error:
        _exit(error)
    except Exception as error:
        endings.end(error)
        # Python prints the traceback now; at the end _report_unseen() sees whether it did
        _written = endings.count_errors()
        raise


def _exit(error: SystemExit) -> None:
    """End the process as main() has asked with sys.exit(): without an argument or with 0 as if it had
    returned, with a number as the code, and with a text on standard error and the code 1."""
    in_group = endings.in_group()
    if error.code in (None, 0):  # a text may be empty
        endings.end(None)
        raise error
    if not isinstance(error.code, int):
        write_error(f"{mask(str(error.code))}\n")
    endings.end(error)
    if in_group:  # another process can block the exit
        leave(endings.code_of(error))
    sys.exit(endings.code_of(error))


def _end(number: int, frame: object) -> None:
    """End the process after Ctrl-C while it still imports: the handler of SIGINT until run()."""
    say_error("interrupted")
    os._exit(INTERRUPTED)  # the job has not begun: there is nothing to clean up


def _explain_missing_package(error: BaseException) -> str:
    """Return one line on a package that is not installed; "" for another error, also for a module of this
    repository."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] in _OURS:
        return ""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{error}, which {place.filename}:{place.lineno} imports: pip install -r requirements.txt, or "
        f"use the Python that has it (this is {sys.executable})"
    )


def _report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Report an exception that ends the program. A package that is not installed is one line. Python calls it
    as sys.excepthook, also for errors of the job's imports. If code of the job has put its own function
    there, as torch.distributed does, that one may call this one."""
    if reason := _explain_missing_package(error.with_traceback(trace)):
        error = BadInput(reason)
    if isinstance(error, BadInput):
        say_error(str(error))
        leave(error.code)
    with contextlib.suppress(Exception):  # to sys.stderr, which another package may have replaced
        sys.stderr.write(format_traceback(error))


def _report_in_thread(arguments: Any) -> None:
    """Report an exception that has ended a thread. Python calls it as threading.excepthook."""
    if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
        write_error(f"Exception in thread {arguments.thread and arguments.thread.name}:\n")
        say_traceback(arguments.exc_value)


def _report_unseen() -> None:
    """Report the exception that has ended the program if nothing has reached standard error: what replaced
    sys.excepthook or sys.stderr has not printed it. Python calls this function at its end."""
    error = getattr(sys, "last_value", None)
    if error is not None and _written is not None and endings.count_errors() == _written:
        say_traceback(error)


sys.excepthook = _report
threading.excepthook = _report_in_thread
atexit.register(_report_unseen)
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a shell's background job
    signal.signal(signal.SIGINT, _end)


if importlib.util.find_spec("torch_npu"):
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # accelerator.py names its errors

levels.apply(sys.argv[1:], os.environ)  # torch reads the variables when it is imported

# Threads of OpenMP wait for each other at the end of every operation. By default libgomp (in PyTorch's wheels
# for Linux) first spins for milliseconds. If other processes use the cores, a spinning thread can block the
# thread that it waits for. The variable is read when torch is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"  # tens of microseconds; libgomp's default: 300,000
