"""Parse the faults of a simulation: kill:rank=3,step=20."""

from dataclasses import dataclass

from common.ground.exits import BadInput

KINDS = {  # kind: its keys, in [] if they may be missing
    "kill": "rank step",  # SIGKILL
    "term": "rank step",  # SIGTERM
    "stop": "rank step",  # SIGSTOP: the process hangs, its connections stay open
    "restart": "node step",  # in place: the same folders, the command again
    "reschedule": "[node] step",  # a new container; without a node: all nodes
}
_MOST = 10**9


@dataclass(frozen=True)
class Fault:
    """One fault.

    step: the optimizer step that the fault waits for
    rank: global; None for a fault of nodes
    node: its index; None for a fault of a rank, or of all nodes
    """

    text: str
    kind: str
    step: int
    rank: int | None = None
    node: int | None = None


def parse(spec: str, nodes: int, processes: int) -> Fault:
    """Return the fault that `spec` names, for nodes x processes ranks. Raises BadInput with the spec and its
    keys."""
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise BadInput(f"--fault {spec}: unknown fault {kind!r}: expected one of {', '.join(KINDS)}")
    keys = KINDS[kind].split()
    pairs = [pair.partition("=")[::2] for pair in rest.split(",")]
    given = [key for key, _ in pairs]
    unknown, missing = {*given} - {key.strip("[]") for key in keys}, {*keys} - {*given, "[node]"}
    if unknown or missing or len({*given}) < len(given):
        raise BadInput(f"--fault {spec}: expected {kind} with the keys {', '.join(keys)}, each once")
    limits = {"step": (1, _MOST), "rank": (0, nodes * processes - 1), "node": (0, nodes - 1)}
    return Fault(spec, kind, **{key: _number(spec, key, value, *limits[key]) for key, value in pairs})


def _number(spec: str, key: str, value: str, least: int, most: int) -> int:
    if not value.isdecimal() or not least <= int(value) <= most:
        raise BadInput(f"--fault {spec}: {key}={value} is not a whole number in {least}..{most}")
    return int(value)
