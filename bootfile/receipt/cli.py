"""Compare two runs: the data of every step, and the state (weights, buffers, optimizer) at checkpoints.

    bootfile receipt RUN_A RUN_B
    bootfile receipt RUN            one run: is something unusual? What did each restart read?

Unusual are epochs with the same order, samples that come twice or never in an epoch, ranks with the same
samples; in a run of Bootfile, a step without the samples of (seed, epoch, step). Options say what is right.

RUN_A and RUN_B: output folders of runs, at any world size, with any loader, restarted or not; or folders of
the receipt that `python -m launch new --receipt` adds to any loop. Exit codes: 0 equal; 1 something is
unusual, the data differ (the output names the first epoch and step, and what differs), one run is shorter, or
the states differ at the same number of processes or with the same --exact_shards; 2 a receipt cannot be read,
or the runs have different seeds. Without --exact_shards another number of processes rounds sums differently,
so different states are expected.
"""

import itertools

import numpy as np

from bootfile.console.parser import Parser
from bootfile.ground.errors import BadInput, printable
from bootfile.receipt import loop_records, one_run, receipt
from bootfile.receipt.compare import LOOP, compare_records, compare_states, find_receipt, read_setting
from bootfile.receipt.recorded_run import Run


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "bootfile receipt")
    parser.add_argument("run_a", metavar="RUN_A", help="output folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", nargs="?", help="output folder of another run")
    one_run.add_arguments(parser.add_argument)
    args = parser.parse_args(arguments)
    paths = [path for path in (args.run_a, args.run_b) if path is not None]
    usual = {name: getattr(args, name) for name in ("repeats", "same_order", "augmented")}
    if args.run_b is not None and any(usual.values()):
        raise BadInput("--repeats, --same_order and --augmented are about one run")
    if all(find_receipt(path) == LOOP for path in paths):
        try:
            equal, lines = loop_records.report(paths, **usual)
        except loop_records.ReceiptError as error:
            raise BadInput(str(error)) from error
        print(*map(printable, lines), sep="\n")
        return 0 if equal else 1
    if args.run_b is None:
        return _report_run(args.run_a, **usual)
    runs = {path: receipt.read(path) for path in paths}
    seeds = [read_setting(path, "seed") for path in paths]
    if None not in seeds and seeds[0] != seeds[1]:
        raise BadInput(f"the runs have the seeds {seeds[0]} and {seeds[1]}: their samples differ by design")
    for path, records in runs.items():
        _print_size(path, records)
    equal, text = compare_records(runs[args.run_a], runs[args.run_b])
    print(f"data {text}")
    same_state, text = compare_states(args.run_a, args.run_b)
    print(printable(f"state {text}"))
    return 0 if equal and same_state else 1


def _print_size(path: str, records: np.ndarray) -> None:
    steps, epochs = int(records["step"][-1]), int(records["epoch"][-1])
    lost = f", {steps - len(records)} without a record" if steps > len(records) else ""
    print(f"{path}: {steps} steps, {epochs} epoch{'s' * (epochs != 1)}{lost}")


def _report_run(path: str, repeats: bool, same_order: bool, augmented: bool) -> int:
    """Judge one run of Bootfile, whose receipt has only the sums of each step."""
    run = Run(path)
    records = run.records
    _print_size(path, records)
    found = []
    for number in np.unique(records["epoch"]):
        own = records[records["epoch"] == number]
        sums, first = own["sums"], int(own["step"][0])
        found.append(one_run.Epoch(int(number), first, sums[:, 0], sums[:, 2], []))
    epochs = one_run.mark_whole(found, len(run.starts) - 1)
    is_shuffled = (run.starts[-1].get("sampling") or {}).get("shuffle", True)
    lines = [] if same_order or not is_shuffled else one_run.find_same_orders(epochs)
    lines += one_run.find_same_contents(epochs, True) if augmented else []
    lines += [] if repeats else _find_other_samples(run)
    print(*(printable(f"unusual: {line}") for line in lines), sep="\n", end="\n" * bool(lines))
    return 1 if lines else 0


def _find_other_samples(run: Run) -> list[str]:
    """Return a line for the first step that had other samples than those of (seed, epoch, step). If the
    records do not say which these are, a line about it is printed."""
    for _, group in itertools.groupby(run.records, lambda record: run.start_of(record["step"])):
        known = {int(record["step"]): record["sums"][0] for record in group}
        step, last = min(known), max(known)
        try:
            sampler = run.sampler(last)
        except BadInput as error:
            print(printable(f"not checked: {error}"))
            return []
        while step <= last:
            sampler.seek(step - 1)
            for ids in sampler:  # to the end of the epoch
                if step in known and run.sum_ids(sampler, ids).view("u8")[0] != known[step]:
                    return [f"step {step} had other samples than those of its seed, epoch and number"]
                step += 1
    return []
