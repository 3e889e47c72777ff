"""The results of a job's cases, and the verdict."""

from typing import NamedTuple

from bootfile.ground.exit_codes import DIFFERS, UNVERIFIED
from bootfile.prove import trial
from bootfile.prove.cases import (
    AGAIN,
    ALL_DAMAGED,
    DAMAGED,
    KILLED,
    ONE_CHANGE,
    OTHER_THREADS,
    PROCESSES,
    SAME,
    SAME_THREADS,
    Case,
    NotRun,
)
from bootfile.prove.job import Job
from bootfile.receipt import compare
from bootfile.receipt.compare import Line

# results of a case, in addition to "equal", "differs", "failed" and "nothing to compare"
NOTICED = "noticed"
NOT_NOTICED = "not noticed"
REFUSED = "refused"
NOT_RUN = "not run"


class Row(NamedTuple):
    """One case. done: what was done to the run. lines: [] if nothing was compared. result."""

    case: Case
    done: str
    lines: list[Line]
    result: str

    @property
    def different(self) -> list[Line]:
        """Return the comparisons that differ, without those that need not be equal."""
        ignored: tuple[str, ...] = ()
        if not self.case.checks_state:  # another number of processes rounds sums in another way
            ignored = ("state", "figures", "weights")
        return [line for line in self.lines if not line.equal and line.part not in ignored]


def run(job: Job, case: Case) -> Row:
    """Run a case and compare it. A difference counts only between runs of new processes. Raises BadInput."""
    doubts_before = len(job.doubts)
    unchecked_before = len(job.unchecked)
    row = _run(job, case)
    # a fork may differ by itself: then job.repeat() has made the reference by a new process
    if row.result in ("differs", "failed") and job.repeat(case):
        del job.doubts[doubts_before:]
        del job.unchecked[unchecked_before:]
        row = _run(job, case)
    return row


def _run(job: Job, case: Case) -> Row:
    """Run a case and compare it with the run that it names. Raises BadInput."""
    try:
        done = job.run(case)
    except NotRun as reason:
        return Row(case, str(reason), [], NOT_RUN)
    except trial.Failed as error:
        # a job that ends with an error at a damaged checkpoint has noticed the damage
        if case.damages:
            return Row(case, str(error), [], REFUSED)
        # a job that does not run in other surroundings has computed nothing else: that is not a difference
        if case.changes and not case.kills:
            if len(case.changes) == 1:  # else each one follows
                job.unchecked.append(f"{case.changes[0]}: {error}")
            return Row(case, str(error), [], NOT_RUN)
        result = "differs"
        if case.must_differ:  # a run with another seed that ends with an error shows nothing
            result = "failed"
        return Row(case, "", [Line("", False, str(error))], result)
    lines = compare.compare_runs(job.folder(case.against), job.folder(case.name), job.weights)
    row = Row(case, done, lines, "nothing to compare")
    if not lines:
        return row
    if not case.must_differ:
        if row.different:
            return row._replace(result="differs")
        return row._replace(result="equal")
    if row.different:
        return row._replace(result=NOTICED)
    # equal to the reference, although it was changed: the job may have refused what was changed
    if case.damages and job.refused(case):
        return row._replace(result=REFUSED)
    return row._replace(result=NOT_NOTICED)


def needs_more(row: Row) -> list[Case]:
    """Return the cases that have to follow: one tensor of a checkpoint may have no effect on the results, and
    a difference in other surroundings has one cause."""
    if row.case == DAMAGED and row.result == NOT_NOTICED:
        return [ALL_DAMAGED]
    # is the job repeatable at all, in the same surroundings?
    if row.case == AGAIN and row.result != "equal":
        return [SAME]
    if row.case.name == KILLED and row.result == "differs":
        # threads change the rounding of sums: they neither make a restart fail, nor read other samples
        if row.different[0].part in ("", "data"):
            return []
        return [row.case._replace(name=SAME_THREADS, changes=())]
    if row.case.name == SAME_THREADS and row.result == "equal":
        return [OTHER_THREADS]
    # it is: which one of the changes makes the difference?
    if row.case == SAME and row.result == "equal":
        return ONE_CHANGE
    return []


def find_difference(rows: list[Row]) -> Row | None:
    """Return the run that should be equal and is not, the one which the verdict names; None without one."""
    by_name = {row.case.name: row for row in rows}
    names_cause = (SAME, *ONE_CHANGE)  # so these come first
    causes = [row for row in rows if row.case in names_cause]
    others = [row for row in rows if row.case not in names_cause]
    for row in causes + others:
        if row.case.must_differ or row.case == OTHER_THREADS or not row.different:
            continue
        if row.case.name != KILLED or SAME_THREADS not in by_name:
            return row
        # without the differences that another number of threads makes
        same_threads = by_name[SAME_THREADS]
        if same_threads.different:
            return same_threads
        if not _depends_on_threads(by_name):
            return row
    return None


def _depends_on_threads(by_name: dict[str, Row]) -> bool:
    """Return whether the threads alone make a run differ. If not, a restart with the same threads was equal
    only because its kills came at lucky places."""
    other_threads = by_name.get(OTHER_THREADS.name)
    return other_threads is not None and bool(other_threads.different)


def conclude(job: Job, rows: list[Row], cause: str = "") -> tuple[str, int]:
    """Return the verdict and the exit code. cause: why the run of find_difference() differs, "" if that is
    not known."""
    condition = ""
    by_name = {row.case.name: row for row in rows}
    is_equal = SAME_THREADS in by_name and by_name[SAME_THREADS].result == "equal"
    if is_equal and _depends_on_threads(by_name):
        text = by_name[KILLED].different[0].text
        if job.keeps_threads:
            return f"differs: a restart with another number of threads: {text}", DIFFERS
        condition = (
            f"; only with the same number of threads: with another one a restart differs ({text}): call "
            "torch.set_num_threads(N) in the script"
        )
        rows = [row for row in rows if row.case.name != KILLED]
    different = find_difference(rows)
    if different:
        name = different.case.name
        if name == SAME_THREADS:  # for a reader it is the same case
            name = KILLED
        text = different.different[0].text
        if cause:
            text = f"{cause} ({text})"
        return f"differs: {name}: {text}", DIFFERS
    # from here on nothing differs: is that a proof?
    doubts = _find_doubts(job, rows)
    if doubts:
        return f"unverified: {'; '.join(doubts)}", UNVERIFIED
    equal = [row for row in rows if row.result == "equal"]
    # a job that compares digests of its checkpoints refuses a wrong weight: that is right, and hides the rest
    end = ", and each run made wrong on purpose was noticed"
    if any(row.result == REFUSED for row in rows):
        end = "; the damaged checkpoint was refused, so it was not shown that wrong weights are noticed"
    numbers = {job.processes}  # of processes of the equal runs
    for row in equal:
        if row.case.option == PROCESSES and not row.case.kills:
            numbers.add(int(row.case.value))
    same_bits = [str(number) for number in sorted({*job.same_bits} & numbers)]
    bits = ""
    if len(same_bits) > 1:
        bits = f"; same bits on {', '.join(same_bits[:-1])} and {same_bits[-1]} processes"
    return f"exact: {len(equal)} runs equal the reference{end}{bits}{condition}", 0


def _find_doubts(job: Job, rows: list[Row]) -> list[str]:
    """Return why runs that are all equal prove nothing, in words; [] if they prove that the job is exact."""
    doubts = list(job.doubts)
    has_weights = False  # whether a state or a file of weights was compared
    for row in rows:
        if row.result == "failed":
            doubts.append(f"{row.case.name}: {row.lines[0].text}")
        # if a damaged tensor has no effect, the case with all tensors damaged decides
        if row.result == NOT_NOTICED and not needs_more(row):
            doubts.append(f"{row.case.name}: no difference was noticed")
        for line in row.lines:
            if line.part in ("state", "weights"):
                has_weights = True
    # equal samples alone do not show that the optimizer was restored
    if not has_weights:
        doubts.append("no state and no file of weights was compared")
    return doubts


def find_notes(rows: list[Row]) -> list[str]:
    """Return facts that the verdict does not have."""
    notes = []
    for row in rows:
        if row.case == DAMAGED and needs_more(row):
            tensor = row.done.partition(" is changed")[0]
            notes.append(f"{tensor} is saved, but a change has no effect on the results")
    return notes
