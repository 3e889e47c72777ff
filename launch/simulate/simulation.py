"""Run a simulation: start nodes, fire faults, wait until the nodes end.

All of it runs in the one thread of `launch simulate`; each rank of the job is another process. The simulation
sees only the lines that the nodes print, and the processes of this machine.
"""

import signal
import time

from bootfile.ground.exit_codes import TIME_LIMIT, explain_end
from launch.simulate.faults import Fault
from launch.simulate.injector import Injector
from launch.simulate.job import Commands, Job, log
from launch.simulate.nodes import Node

NEVER_FIRED = 3  # exit code: every node ended with 0, but a fault never fired
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL


class Simulation:
    """A simulation of nodes. processes: of each. faults: fire in this order. limit: seconds, or None."""

    def __init__(self, processes: int, faults: list[Fault], limit: float | None):
        self._processes = processes
        self._faults = faults
        self._limit = limit
        self._interrupts: list[int] = []  # numbers of the signals that the simulation got

    def interrupt(self, number: int, frame: object) -> None:
        """Note a signal, on which run() ends all nodes. It may come between any two statements."""
        self._interrupts.append(number)

    def run(self, nodes: list[Node], commands: Commands) -> int:
        """Run the nodes to their end, print a table, and return the exit code. An error kills all."""
        for node in nodes:
            node.make_folders()
        job = Job(nodes, commands, self._processes)
        injector = Injector(job, self._faults, lambda: self._is_over(job))
        code = None
        try:
            for node in nodes:
                job.start(node)
            while code is None and job.running:
                time.sleep(injector.round_seconds)
                job.read()
                injector.fire()
                _reap(job)
                # after _reap(): only nodes that still run can be stopped
                injector.kill_if_all_stopped()
                code = self._end_from_outside(job, injector)
            return _report(job, injector, commands, code)
        finally:
            for node in job.running:
                node.kill()

    def _is_over(self, job: Job) -> bool:
        """Return whether a signal has come, or the limit is reached."""
        return bool(self._interrupts) or (self._limit is not None and job.seconds > self._limit)

    def _end_from_outside(self, job: Job, injector: Injector) -> int | None:
        """End the nodes after a signal or at the limit, and return the exit code; else return None."""
        if not self._is_over(job):
            return None
        if self._interrupts:
            number = self._interrupts[0]
            reason, code = f"{signal.Signals(number).name} to the simulation", 128 + number
        else:
            reason, code = f"--limit {self._limit:g}", TIME_LIMIT
        log(f"{reason} after {job.seconds:.1f} s: ending all nodes")
        # before SIGTERM: a stopped process gets no signal but SIGKILL
        injector.continue_all()
        for node in job.running:
            node.runs[-1].note = f"ended by {reason}"
            node.restarts = 0  # _reap() must not start it again
            node.end(signal.SIGTERM)
        # the nodes save and end by themselves; what they print meanwhile is shown
        deadline = time.monotonic() + _GRACE
        while job.running and time.monotonic() < deadline:
            time.sleep(injector.round_seconds)
            job.read()
            _reap(job)
        for node in job.running:
            node.kill()
            job.finish(node)
        return code


def _reap(job: Job) -> None:
    """Close the runs that have ended, and restart failed nodes that may be."""
    for node in job.nodes:
        if node.poll() is None:
            continue
        code = job.finish(node)
        if code and node.restarts:
            node.restarts -= 1
            how = "a new pod replaces it" if node.is_pod else "it is restarted in place"
            log(f"node {node.index} ended with {code}: {how}")
            if node.is_pod:
                node.make_folders()
            job.start(node)


def _report(job: Job, injector: Injector, commands: Commands, code: int | None) -> int:
    """Print the table and return the exit code. code: None if the nodes ended by themselves."""
    print(f"\n{'node':<16}{'exit code':>9}{'seconds':>10}  explanation")
    for node in job.nodes:
        for number, run in enumerate(node.runs, start=1):
            label = f"{node.index} run {number}" if len(node.runs) > 1 else str(node.index)
            meaning = run.note or explain_end(run.code or 0, run.error)
            print(f"{label:<16}{run.code:>9}{run.ended - run.began:>10.1f}  {meaning}")
    print(flush=True)
    failed = any(run.error for node in job.nodes for run in node.runs)
    if failed and not commands.code.is_repository:
        log("guides/own_script.md lists the errors of scripts on platforms, and what to change")
    for fault in injector.pending:
        log(f"fault {fault.text} never fired: the last step seen is {job.step}")
    if code is not None:
        return code
    # the node that failed first: the others often fail because of it
    runs = sorted((node.runs[-1] for node in job.nodes), key=lambda run: run.ended)
    failures = [run.code for run in runs if run.code]
    return next(iter(failures), NEVER_FIRED if injector.pending else 0)
