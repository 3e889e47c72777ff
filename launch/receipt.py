"""Compare two runs: the data of every step, and the state (weights, buffers, optimizer) at checkpoints.

    python -m launch receipt RUN_A RUN_B
    python -m launch receipt RUN            a receipt of `launch new --receipt`: what each restart read

RUN_A and RUN_B: output folders of runs, at any world size, with any loader, restarted or not; or folders of
the receipt that `python -m launch new --receipt` adds to any loop. Exit codes: 0 equal; 1 the data differ
(the output names the first epoch and step, and what differs), one run is shorter, or the states differ at the
same number of processes or with the same --exact_shards; 2 a receipt cannot be read, or the runs have
different seeds. Without --exact_shards another number of processes rounds sums differently, so different
states are expected.
"""

from common.console.arguments import Parser
from common.ground.exits import BadInput, printable
from datasets.sampling import loop_receipt, receipt
from launch.compare import LOOP, compare_records, compare_states, find_receipt, read_setting


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch receipt")
    parser.add_argument("run_a", metavar="RUN_A", help="output folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", nargs="?", help="output folder of another run")
    args = parser.parse_args(arguments)
    paths = [path for path in (args.run_a, args.run_b) if path is not None]
    if all(find_receipt(path) == LOOP for path in paths):
        return _report_loops(paths)
    if args.run_b is None:
        raise BadInput("expected RUN_A RUN_B: one run is enough only for a receipt of `launch new --receipt`")
    runs = {path: receipt.read(path) for path in (args.run_a, args.run_b)}
    seeds = [read_setting(path, "seed") for path in paths]
    if None not in seeds and seeds[0] != seeds[1]:
        raise BadInput(f"the runs have the seeds {seeds[0]} and {seeds[1]}: their samples differ by design")
    for path, records in runs.items():
        steps, epochs = int(records["step"][-1]), int(records["epoch"][-1])
        lost = f", {steps - len(records)} without a record" if steps > len(records) else ""
        print(f"{path}: {steps} steps, {epochs} epoch{'s' * (epochs != 1)}{lost}")
    equal, text = compare_records(runs[args.run_a], runs[args.run_b])
    print(f"data {text}")
    same_state, text = compare_states(args.run_a, args.run_b)
    print(printable(f"state {text}"))
    return 0 if equal and same_state else 1


def _report_loops(paths: list[str]) -> int:
    try:
        equal, lines = loop_receipt.report(paths)
    except loop_receipt.ReceiptError as error:
        raise BadInput(str(error)) from error
    print(*map(printable, lines), sep="\n")
    return 0 if equal else 1
