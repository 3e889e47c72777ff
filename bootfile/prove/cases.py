"""The cases of a proof: what is changed in a run, and with which other run it is compared."""

from typing import NamedTuple

from bootfile.prove import surroundings

REFERENCE = "reference"  # the run with which most others are compared
KILLED = "killed and restarted"
STOPPED = "stopped by SIGTERM and restarted"
SAME_THREADS = f"{KILLED}, with the same number of threads"  # runs only if KILLED differs
PROCESSES = "--processes_per_node"
REPLACED = "killed processes are replaced, the others stay alive"


class NotRun(Exception):
    """A case cannot be run. The message has the reason."""


class Case(NamedTuple):
    """A run that is compared with another one.

    checks_state: whether states, figures and weights must be equal too.
    must_differ: whether a difference is right.
    option: of the job, for a job of Bootfile.
    value, other: those of the option; the second one is used if the reference has the first one.
    kills: number of SIGKILLs.
    stops: number of SIGTERMs, at random moments of the run.
    against: name of the run with which it is compared.
    damages: tensors of its checkpoint that are changed: "largest", "all" or "" (none).
    changes: names of `surroundings`, what is changed around the job; another number of threads: at a restart.
    losses: ranks that get a SIGKILL at once, each time at another step; the job replaces them (--elastic).
    """

    name: str
    checks_state: bool = True
    must_differ: bool = False
    option: str = ""
    value: str = ""
    other: str = ""
    kills: int = 0
    stops: int = 0
    against: str = REFERENCE
    damages: str = ""
    changes: tuple[str, ...] = ()
    losses: tuple[tuple[int, ...], ...] = ()


AGAIN = Case("the same again, in other surroundings", changes=surroundings.ALL)
SAME = Case("the same again")  # runs only if AGAIN differs, and then those with one change
ONE_CHANGE = [Case(f"the same again, with {change}", changes=(change,)) for change in surroundings.ALL]
# runs only if a restart is equal with the same number of threads: does the number matter without a kill?
OTHER_THREADS = Case(f"the same again, with {surroundings.THREADS}", changes=(surroundings.THREADS,))
DAMAGED = Case("restarted from a damaged checkpoint", must_differ=True, damages="largest")
ALL_DAMAGED = Case("restarted from a checkpoint with all tensors damaged", must_differ=True, damages="all")
OTHER_PROCESSES = Case(
    "another number of processes", checks_state=False, option=PROCESSES, value="2", other="1"
)
CHANGES = (  # cases that change one option
    OTHER_PROCESSES,
    Case("another number of workers", option="--workers", value="1", other="2"),
    Case("another engine", checks_state=False, option="--data_backend", value="threads", other="pytorch"),
    Case("another seed", must_differ=True, option="--seed", value="1", other="2"),
)
