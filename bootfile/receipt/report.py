"""Judge one run, or compare two, in the lines that the programs print."""

from bootfile.ground.numbers import counted
from bootfile.receipt.one_run import Options, find_unusual
from bootfile.receipt.steps import (
    History,
    compare,
    describe_size,
    find_left_out,
    follow,
    name_few,
    name_ranges,
)


def report(folders: list[str], histories: list[History], options: Options) -> tuple[bool, list[str]]:
    """Return (whether one or two runs read what they should, lines about them). options: for one run. Raises
    ReceiptError."""
    runs = [follow(history) for history in histories]
    is_right = all(run.is_equal for run in runs)
    lines: list[str] = []
    for folder, run, history in zip(folders, runs, histories, strict=True):
        lines.append(f"{folder}: {describe_size(run.steps, history.begin)}")
        lines += filter(None, [history.origin])
        removed = sum(count for count, _ in history.removed.values())
        if removed:
            samples = counted(removed, "sample")
            lines.append(f"{samples} of {name_few([*history.removed])} removed (--without)")
        # a step without any sample (--without) is one of the removed, and not one of --skip_steps
        left_out = [step for step in find_left_out(run.steps) if step not in history.removed]
        if left_out:
            lines.append(f"{name_ranges(left_out)} left out (--skip_steps)")
        lines += run.lines
    if len(histories) == 2:
        is_equal, text = compare(histories[0], histories[1])
        return is_right and is_equal, [*lines, f"data {text}"]
    unusual = find_unusual(runs[0].steps, histories[0].restarts, options)
    return is_right and not unusual, [*lines, *(f"unusual: {line}" for line in unusual)]
