"""Run the zoo: known defects of released packages and correct set-ups, each examined by a receipt.

    make zoo                                 all cases
    .venv-zoo/bin/python -m tests.zoo NAME   some cases; an unknown name shows all of them

Each case trains once to the end, and once more with a kill (SIGKILL) and a restart. Then
`python -m launch receipt` compares both. If a case is judged by one run, it trains once only. Cases of state
are judged by `python -m launch prove --compare`, or two trainings that must be equal are compared by the
digest of their states. Exit codes: 0 each result is the expected one; 1 a result is not, or a program failed;
2 an unknown name.
"""

import argparse
import collections
import concurrent.futures
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from bootfile.exact import checked_files, digest
from bootfile.receipt.compare import compare_runs
from bootfile.records import write_state
from tests.zoo.cases import CASES, STATES, Case, State

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RELEASES = Path(sys.prefix, "releases")  # see releases.txt
LAST = 1000  # a step that no program reaches
LIMIT = 600  # seconds for one start
RANK_1 = "rank 1"  # State.other: the states of two ranks are compared


class Failed(Exception):
    """A program did not end as it should. The message has its last line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of cases (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of cases at a time (default: 2)")
    args = parser.parse_args()
    known: list[Case | State] = [*CASES, *STATES]
    if unknown := set(args.names) - {case.name for case in known}:
        print(f"error: unknown: {', '.join(sorted(unknown))}; expected", *(case.name for case in known))
        return 2
    cases = [case for case in known if case.name in args.names or not args.names]
    project = ROOT / "output_dir" / "zoo"  # it is replaced
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    (project / "bootfile").symlink_to(ROOT / "bootfile")  # without Bootfile's `datasets` next to it
    lines = {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        tasks = {pool.submit(examine, case, project): case for case in cases}
        for count, task in enumerate(concurrent.futures.as_completed(tasks), 1):
            case = tasks[task]
            lines[case.name] = task.result()
            heading = f"[{count}/{len(cases)}] {case.name}, {case.package}"
            print(heading, *lines[case.name], sep="\n      ", flush=True)
    return report(cases, lines)


def examine(case: Case | State, project: Path) -> list[str]:
    """Return the lines about a case, the result last, or one line with the reason of a failure."""
    folder = project / case.name
    folder.mkdir()
    name, version = case.package.split("==")
    paths = [str(project), str(RELEASES / case.package)]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "ZOO_PACKAGE": name, "ZOO_VERSION": version,
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    if isinstance(case, State):
        return compare(case, folder, environment) if case.other else prove(case, folder, environment)
    program, *options = case.command.split()
    command = start(program, case.ranks)
    stops_of_runs = {"undisturbed": ()} if case.one_run else {"undisturbed": (), "restarted": case.stops}
    try:
        for run_name, stops in stops_of_runs.items():
            for step in stops:
                run([*command, run_name, str(step), *options], folder, environment, killed=True)
            run([*command, run_name, str(LAST), *options], folder, environment)
    except Failed as error:
        return [f"failed: {error}"]
    runs = [str(folder / each) for each in stops_of_runs]
    result = subprocess.run(
        [sys.executable, "-m", "launch", "receipt", *runs, *case.options.split()],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return (result.stdout or result.stderr).replace(f"{folder}{os.sep}", "").splitlines()


def start(program: str, ranks: int) -> list[str]:
    """Return the arguments of Python that start a program of this folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*(launcher if ranks > 1 else []), str(HERE / program)]


def prove(case: State, folder: Path, environment: dict) -> list[str]:
    """Return the lines of `launch prove` about a case, the verdict last."""
    program, *options = case.command.split()
    out = folder / "out"
    result = subprocess.run(
        [sys.executable, "-m", "launch", "prove", str(HERE / program), "--compare", f"{out}/*.pt",
         "--resume_with=--resume", "--", str(out), str(LAST), *options],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    lines = (result.stdout + result.stderr).replace(f"{out}{os.sep}", "").splitlines()
    results = ("exact: ", "differs: ", "unverified: ", "error: ")
    verdicts = [line for line in lines if line.startswith(results)]
    return [*(line.strip() for line in lines if line.startswith("  ")), *verdicts[-1:]]


def compare(case: State, folder: Path, environment: dict) -> list[str]:
    """Return lines about two trainings: their samples if they have receipts, and last their states."""
    program, *options = case.command.split()
    first, second = folder / "first", folder / "second"
    try:
        run([*start(program, case.ranks), str(first), str(LAST), *options], folder, environment)
        if case.other == RANK_1:
            second = first / "rank1"
        else:
            words = [*start(program, case.other_ranks), str(second), str(LAST), *case.other.split()]
            run(words, folder, environment)
    except Failed as error:
        return [f"failed: {error}"]
    for each in (first, second):
        state = checked_files.load(str(each / "saved.pt"))
        write_state(str(each), digest.summarize(state["step"], state))
    lines = compare_runs(str(first), str(second), "none")
    return [f"{line.part} {line.text}" for line in lines if line.part == "state" or case.other != RANK_1]


def run(arguments: list[str], folder: Path, environment: dict, killed: bool = False) -> None:
    """Run Python and wait for it. Raises Failed if it does not end as expected."""
    command = [sys.executable, *arguments]
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no end after {LIMIT} s: {' '.join(arguments)}") from error
    was_killed = result.returncode == -signal.SIGKILL or "SIGKILL" in result.stderr  # also by torchrun
    if was_killed != killed or (result.returncode and not killed):
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        raise Failed(f"exit code {result.returncode} of {' '.join(arguments)}: {' '.join(lines[-1:])}")


def report(cases: list[Case | State], lines: dict[str, list[str]]) -> int:
    """Print the table and return the exit code."""
    row = "{:26} {:21} {:46} {:11} {}"
    print("", row.format("case", "release", "thread", "of", "result"), sep="\n")
    counts = collections.Counter()
    for case in cases:
        text = lines[case.name][-1]
        verdict = judge(case, text)
        wanted = ("found", "alarm") if case.expected else ("not found", "no alarm")
        is_expected = case.expected in text and verdict in wanted
        counts.update({verdict: 1, "expected": is_expected, "defects": bool(case.thread)})
        thread = case.thread or "correct set-up"
        result = verdict + " (NOT EXPECTED)" * (not is_expected)
        print(row.format(case.name, case.package, thread, case.date, result))
        print(f"    {case.text}", f"    {text}", sep="\n")
    controls = len(cases) - counts["defects"]
    print(f"\n{counts['found']} of {counts['defects']} defects found", end="; ")
    print(f"no alarm in {counts['no alarm']} of {controls} correct set-ups", end="; ")
    print(f"{counts['expected']} of {len(cases)} results are the expected ones")
    return 0 if counts["expected"] == len(cases) else 1


def judge(case: Case | State, text: str) -> str:
    """Return the result of a case. text: the last line about it."""
    if isinstance(case, State):
        usual, unusual = ("state equal at ", "state differs at ") if case.other else ("exact: ", "differs: ")
    else:
        usual, unusual = ("undisturbed: ", "unusual: ") if case.one_run else ("data equal for ", "data ")
    if not text.startswith((usual, unusual)):
        return "failed"
    is_usual = text.startswith(usual)
    if case.thread:
        return "not found" if is_usual else "found"
    return "no alarm" if is_usual else "alarm"


if __name__ == "__main__":
    sys.exit(main())
