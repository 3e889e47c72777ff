"""The results of a job's cases, and the verdict."""

import shutil
from typing import NamedTuple

from bootfile.ground.errors import BAD_INPUT
from bootfile.ground.exit_codes import DIFFERS, UNVERIFIED
from bootfile.prove import cases, trial
from bootfile.prove.cases import KILLED, Case, NotRun
from bootfile.prove.causes import join
from bootfile.prove.job import Job
from bootfile.receipt import compare
from bootfile.receipt.compare import Line

# results of a case, in addition to "equal", "differs" and "failed"
NOTICED = "noticed"
NOT_NOTICED = "not noticed"
REFUSED = "refused"
NOT_RUN = "not run"
# threads change the rounding of sums: they neither make a restart fail, nor read other samples
_ROUNDED = ("state", "figures", "weights")


class Row(NamedTuple):
    """One case, what was done to its run, the comparisons with another run, and the result."""

    case: Case
    done: str
    lines: list[Line]
    result: str

    @property
    def different(self) -> list[Line]:
        """Return the comparisons that differ, except for parts that need not be equal."""
        # another number of processes rounds sums in another way
        ignored = () if self.case.checks_state else _ROUNDED
        return [line for line in self.lines if not line.equal and line.part not in ignored]


def run(job: Job, case: Case) -> Row:
    """Run a case and compare it. A difference counts only between runs of new processes. Raises BadInput."""
    before = [*job.doubts], [*job.unchecked]
    row = _run(job, case)
    # a fork may differ by itself: job.repeat() makes the reference by a new process
    if row.result in ("differs", "failed") and job.repeat(case):
        job.doubts, job.unchecked = before
        row = _run(job, case)
    return row


def _run(job: Job, case: Case) -> Row:
    """Run a case and compare it with the run that it names. Raises BadInput."""
    try:
        done = job.run(case)
    except NotRun as reason:
        return Row(case, str(reason), [], NOT_RUN)
    except trial.Failed as error:
        return _judge_failure(job, case, error)
    lines = compare.compare_runs(job.folder(case.against), job.folder(case.name), job.weights)
    row = Row(case, done, lines, "nothing to compare")
    if not lines:
        return row
    if not case.must_differ:
        return row._replace(result="differs" if row.different else "equal")
    # equal to the reference although a checkpoint was damaged: the job may have refused it
    refused = REFUSED if case.damages and job.refused(case) else NOT_NOTICED
    return row._replace(result=NOTICED if row.different else refused)


def _judge_failure(job: Job, case: Case, error: trial.Failed) -> Row:
    """Return the row of a run that has ended with an error."""
    # a job that ends with an error at a damaged checkpoint has noticed the damage
    if case.damages:
        return Row(case, str(error), [], REFUSED)
    # a job that refuses an option, or does not run in other surroundings, has computed nothing else
    if not case.kills and (case.changes or (case.option and error.code == BAD_INPUT)):
        shutil.rmtree(job.folder(case.name), ignore_errors=True)
        changed = case.changes or (case.name,)
        if len(changed) == 1:  # of several changes, each is made alone in a later case
            job.unchecked.append(f"{changed[0]}: {error}")
        return Row(case, str(error), [], NOT_RUN)
    # a run with another seed that ends with an error shows nothing
    return Row(case, "", [Line("", False, str(error))], "failed" if case.must_differ else "differs")


def needs_more(row: Row) -> list[Case]:
    """Return the cases that have to follow because of a result."""
    name, result = row.case.name, row.result
    # one tensor of a checkpoint may have no effect on the results
    if name == cases.DAMAGED.name and result == NOT_NOTICED:
        return [cases.ALL_DAMAGED]
    # is the job repeatable at all, in the same surroundings?
    if name == cases.AGAIN.name and result != "equal":
        return [cases.SAME]
    # it is: which one of the changes makes the difference?
    if name == cases.SAME.name and result == "equal":
        return cases.ONE_CHANGE
    if name == KILLED and result == "differs" and row.different[0].part in _ROUNDED:
        return [row.case._replace(name=cases.SAME_THREADS, changes=())]
    return [cases.OTHER_THREADS] if name == cases.SAME_THREADS and result == "equal" else []


def find_difference(rows: list[Row]) -> Row | None:
    """Return the run that the verdict names, because it should be equal and is not; None without one."""
    by_name = {row.case.name: row for row in rows}
    # the runs that may differ, because they have another number of threads
    excused = {cases.OTHER_THREADS.name}
    if cases.SAME_THREADS in by_name and (by_name[cases.SAME_THREADS].different or depends_on_threads(rows)):
        excused.add(KILLED)
    equal = [row for row in rows if not row.case.must_differ and row.case.name not in excused]
    different = [row for row in equal if row.different]
    # first the runs that have one change or none: they show the cause
    return min(different, key=lambda row: row.case not in (cases.SAME, *cases.ONE_CHANGE), default=None)


def depends_on_threads(rows: list[Row]) -> bool:
    """Return whether another number of threads alone makes a run differ. If it does not, a restart with the
    same number of threads was equal by chance, because of the places of its SIGKILLs."""
    return any(row.case == cases.OTHER_THREADS and row.different for row in rows)


def conclude(job: Job, rows: list[Row], cause: str = "") -> tuple[str, int]:
    """Return the verdict and the exit code. cause: why the run of find_difference() differs; "" if that is
    not known."""
    by_name = {row.case.name: row for row in rows}
    condition = ""  # under which the job is exact
    if depends_on_threads(rows):
        text = by_name[KILLED].different[0].text
        if job.keeps_threads:
            return f"differs: a restart with another number of threads: {text}", DIFFERS
        condition = (
            f"; only with the same number of threads: with another one a restart differs ({text}): call "
            "torch.set_num_threads(N) in the script"
        )
    if different := find_difference(rows):
        # SAME_THREADS repeats KILLED: the verdict has one name for both
        name = KILLED if different.case.name == cases.SAME_THREADS else different.case.name
        text = different.different[0].text
        return f"differs: {name}: {f'{cause} ({text})' if cause else text}", DIFFERS
    if doubts := _find_doubts(job, rows):
        return f"unverified: {'; '.join(doubts)}", UNVERIFIED
    return f"exact: {_describe_equal(job, rows)}{condition}", 0


def _describe_equal(job: Job, rows: list[Row]) -> str:
    """Return what was shown by the runs of an exact job, in words."""
    equal = [row for row in rows if row.result == "equal"]
    text = f"{len(equal)} runs equal the reference"
    # a job that compares digests refuses the damaged checkpoint: no run has trained with wrong weights
    if any(row.result == REFUSED for row in rows):
        text += "; the damaged checkpoint was refused, so it was not shown that wrong weights are noticed"
    else:
        text += ", and each run made wrong on purpose was noticed"
    # the numbers of processes on which a run had equal states
    others = [row.case for row in equal if row.case.option == cases.PROCESSES and not row.case.kills]
    processes = {str(job.processes), *(case.value for case in others)}
    same_bits = [text for text in map(str, job.same_bits) if text in processes]
    return f"{text}; same bits on {join(same_bits)} processes" if len(same_bits) > 1 else text


def _find_doubts(job: Job, rows: list[Row]) -> list[str]:
    """Return why runs that are all equal prove nothing, in words; [] if they prove that the job is exact."""
    doubts = list(job.doubts)
    for row in rows:
        if row.result == NOT_RUN and row.case.damages:
            doubts.append(row.done)
        elif row.result == "failed":
            doubts.append(f"{row.case.name}: {row.lines[0].text}")
        # if a damaged tensor has no effect, the case with all tensors damaged decides
        elif row.result == NOT_NOTICED and not needs_more(row):
            doubts.append(f"{row.case.name}: no difference was noticed")
    # equal samples alone do not show that the optimizer was restored
    if not any(line.part in ("state", "weights") for row in rows for line in row.lines):
        doubts.append("no state and no file of weights was compared")
    return doubts


def find_notes(rows: list[Row]) -> list[str]:
    """Return facts that the verdict does not have."""
    tensors = [
        row.done.partition(" is changed")[0] for row in rows if row.case == cases.DAMAGED and needs_more(row)
    ]
    return [f"{tensor} is saved, but a change has no effect on the results" for tensor in tensors]
