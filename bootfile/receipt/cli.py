"""Compare two runs: the data of every step, and the state (weights, buffers, optimizer) at checkpoints.

    bootfile receipt RUN_A RUN_B
    bootfile receipt RUN            one run: is something unusual? What did each restart read?

Unusual are epochs with the same order, samples that come twice or never in an epoch, ranks with the same
samples; in a run of Bootfile, a step without the samples of (seed, epoch, step). Options say what is right.

RUN_A and RUN_B: output folders of runs, at any world size, with any loader, restarted or not; or folders of
bootfile.Receipt, which any loop can write (guides/receipts.md). Exit codes: 0 equal; 1 something is
unusual, the data differ (the output names the first epoch and step, and what differs), one run is shorter, or
the states differ at the same number of processes or with the same --exact_shards; 2 a receipt cannot be read,
or the runs have different seeds. Without --exact_shards another number of processes rounds sums differently,
so different states are expected.
"""

from bootfile.console.parser import Parser
from bootfile.ground.errors import BadInput, printable
from bootfile.ground.numbers import counted
from bootfile.receipt.compare import compare_states, read_setting
from bootfile.receipt.one_run import Options, find_unusual
from bootfile.receipt.reading import read
from bootfile.receipt.recorded_run import Run
from bootfile.receipt.steps import History, compare, describe_size, find_left_out, follow, name_ranges
from bootfile.sampling.removal import read_removed


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code. Raises BadInput."""
    paths, options = _parse(arguments)
    # the whole receipts: 32 bytes for each step, and for a plain loop 8 bytes for each sample
    histories = [_read(path) for path in paths]
    if any(history.is_of_loop for history in histories):
        is_right, lines = report(paths, histories, options)
    elif len(paths) == 1:
        is_right, lines = _judge(paths[0], histories[0], options)
    else:
        is_right, lines = _compare(paths, histories, options)
    print(*map(printable, lines), sep="\n")
    return 0 if is_right else 1


def _parse(arguments: list[str]) -> tuple[list[str], Options]:
    """Return (the folders of one or two runs, the options of one run). Raises BadInput."""
    parser = Parser(__doc__, "bootfile receipt")
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help="folders of one or two runs")
    add("--repeats", action="store_true", help="one run: samples may come twice in an epoch, or on two ranks")
    add("--same_order", action="store_true", help="one run: epochs may have the same order")
    add("--augmented", action="store_true", help="one run: samples may not look the same in two epochs")
    args = parser.parse_args(arguments)
    folders: list[str] = args.runs
    if len(folders) not in (1, 2):
        raise BadInput(f"expected RUN or RUN_A RUN_B, got {len(folders)} folders")
    options = Options(args.repeats, args.same_order, args.augmented)
    if len(folders) == 2 and any(options):
        raise BadInput("--repeats, --same_order and --augmented are about one run")
    return folders, options


def _read(path: str) -> History:
    """Return what the receipt has of a run, and which samples it lacks."""
    history = read(path)
    is_whole = history.is_of_loop or not len(read_removed(path))
    return history if is_whole else history._replace(removed=Run(path).sum_removed())


def report(folders: list[str], histories: list[History], options: Options) -> tuple[bool, list[str]]:
    """Return (whether one or two runs read what they should, lines about them). options: for one run. Raises
    BadInput."""
    runs = [follow(history) for history in histories]
    lines: list[str] = []
    for folder, run, history in zip(folders, runs, histories, strict=True):
        lines += [f"{folder}: {describe_size(run.steps, history.begin)}", history.origin]
        if removed := sum(count for count, _ in history.removed.values()):
            lines.append(
                f"{counted(removed, 'sample')} of {name_ranges([*history.removed])} removed (--without)"
            )
        # a step without any sample (--without) is one of the removed, and not one of --skip_steps
        if left_out := [step for step in find_left_out(run.steps) if step not in history.removed]:
            lines.append(f"{name_ranges(left_out)} left out (--skip_steps)")
        lines += run.lines
    if len(histories) == 2:
        is_right, text = compare(*histories)
        lines.append(f"data {text}")
    else:
        unusual = find_unusual(runs[0].steps, histories[0].restarts, options)
        is_right = not unusual
        lines += [f"unusual: {line}" for line in unusual]
    return is_right and all(run.is_equal for run in runs), [*filter(None, lines)]


def _judge(path: str, history: History, options: Options) -> tuple[bool, list[str]]:
    """Judge one run of Bootfile, whose receipt has only the sums of each step."""
    run = Run(path)
    sampling = run.starts[-1].get("sampling") or {}
    if not sampling.get("shuffle", True):  # then the same order in each epoch is right
        options = options._replace(same_order=True)
    is_right, lines = report([path], [history], options)
    if options.repeats:
        return is_right, lines
    try:
        step = run.find_other_samples()
    except BadInput as error:
        lines.insert(1, f"not checked: {error}")  # after the size of the run
        return is_right, lines
    if step:
        lines.append(f"unusual: step {step} had other samples than those of its seed, epoch and number")
    return is_right and not step, lines


def _compare(paths: list[str], histories: list[History], options: Options) -> tuple[bool, list[str]]:
    """Compare two runs of Bootfile."""
    seeds = [read_setting(path, "seed") for path in paths]
    # a receipt without starts.jsonl, as one that was copied alone, does not name its seed
    if None not in seeds and seeds[0] != seeds[1]:
        raise BadInput(f"the runs have the seeds {seeds[0]} and {seeds[1]}: their samples differ by design")
    is_right, lines = report(paths, histories, options)
    is_same_state, text = compare_states(paths[0], paths[1])
    return is_right and is_same_state, [*lines, f"state {text}"]
