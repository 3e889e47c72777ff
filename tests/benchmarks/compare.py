"""Compare the figures of a new run with those of a record.

    python -m tests.benchmarks.pairs --json new.json
    python -m tests.benchmarks.compare tests/benchmarks/records/pairs.json new.json

Figures of different machines differ; their ratios to the first row differ less. So each row is compared by
its ratio to the first row of its table, round by round. A row whose ranges do not overlap is marked. Exit
codes: 0 all ranges overlap, 1 some do not, 2 bad input.
"""

import json
import sys

from bootfile.ground.errors import BadInput
from common.distributed.entry import entry
from tests.benchmarks import rounds


def read(path: str) -> dict:
    """Return a record that rounds.Record wrote. Raises BadInput."""
    try:
        with open(path) as file:
            record = json.load(file)
        for table in record["figures"]:
            lengths = {len(values) for values in table["rounds"].values()}
            if len(lengths) > 1 or 0 in lengths:
                raise ValueError("rows have different numbers of rounds")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is not a record of a benchmark: {error}") from error
    return record


def find_ratios(record: dict, names: list[str]) -> list[dict[str, list[float]]]:
    """Return the ratios of each table: row -> its ratio to the first of `names`, in each round."""
    tables = []
    for table in record["figures"]:
        figures = table["rounds"]
        tables.append({name: rounds.divide(figures[name], figures[names[0]]) for name in names[1:]})
    return tables


def compare(old: dict, new: dict) -> int:
    """Print a row for each figure that both records have, and return the number of those that differ."""
    differ = 0
    for record, age in ((old, "old"), (new, "new")):
        load = f"load average {record['load_at_begin']} to {record.get('load_at_end')}"
        print(f"{age}: {record['date']}, {record['machine']}, {' '.join(record['flags'])}, {load}")
    for old_table, new_table in zip(old["figures"], new["figures"], strict=False):
        names = [name for name in old_table["rounds"] if name in new_table["rounds"]]
        if len(names) < 2:
            raise BadInput(f"the tables {old_table['title']} and {new_table['title']} share no two rows")
        ratios = [find_ratios({"figures": [table]}, names)[0] for table in (old_table, new_table)]
        print(f"\n| {new_table['title']}, to {names[0]} | old | new | |\n|---|---|---|---|")
        for name in names[1:]:
            before, after = ratios[0][name], ratios[1][name]
            overlap = min(before) <= max(after) and min(after) <= max(before)
            if not overlap:
                differ += 1
            note = "" if overlap else "differs"
            print(f"| {name} | {rounds.spread(before)} | {rounds.spread(after)} | {note} |")
    return differ


@entry
def main() -> None:
    parser = rounds.make_parser(__doc__)
    parser.add_argument("old", help="a file that --json wrote")
    parser.add_argument("new", help="the same, of another run")
    args = parser.parse_args()
    if compare(read(args.old), read(args.new)):
        sys.exit(1)


if __name__ == "__main__":
    main()
