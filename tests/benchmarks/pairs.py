"""Compare our packs with FFCV's files in pairs, and print what both store and deliver.

    python -m tests.benchmarks.pairs --python ffcv=.venv-ffcv/bin/python
    python -m tests.benchmarks.pairs --data_url FOLDER      your photographs: FOLDER/<class>/*.jpg

A pair is equal if both sides store images of the same size, raw or as JPEGs, and deliver tensors of the
same type, size and layout. FFCV's files are then written from the pixels of our pack. Kernels of the resize
differ: they are printed. "JPEGs unreduced" and "files" compare images in the size of the files.

Installation of FFCV, images and method: `python -m tests.benchmarks.loaders --help`. Without FFCV its pairs
are omitted. Images a CPU second are compared with the aims. --json FILE keeps the figures of each round.
"""

import tempfile

from common.distributed.entry import entry
from tests.benchmarks import loaders, rounds

PAIRS = (  # title, row, reference, aim or None
    ("decoded, uint8", "pack-uint8", "ffcv-raw-short-uint8", 3.0),
    ("decoded, float32", "pack", "ffcv-raw-short", None),  # normalised on the CPU: no GPU job needs it
    ("JPEGs, equal size", "pack-crop", "ffcv-jpeg-short", 2.0),
    ("the same, decoded whole", "pack-jpeg", "ffcv-jpeg-short", None),
    ("the same, only decoded", "decoding-short", "ffcv-jpeg-short", None),  # the bound of "decoded whole"
    ("JPEGs unreduced", "pack-full", "ffcv-jpeg", None),
    ("JPEGs unreduced / files", "pack-full", "torchvision", 3.0),
    ("files", "threads", "torchvision", 2.4),
)
ALIKE = 0.10  # difference of the bytes of two sides that count as equal


def describe_side(name: str, answer: dict) -> str:
    """Return one line about a side of a pair."""
    side = answer["side"]
    return f"{name}: stores {side['stores']}; delivers {side['output']}; {side['kernel']}"


def list_differences(answers: list[dict]) -> str:
    """Return in what the work of two sides differs, but for the kernel; "" if in nothing."""
    ours, other = answers
    differences = []
    kinds = [answer["side"]["stores"].partition(",")[0] for answer in answers]
    if kinds[0] != kinds[1] and "files" not in kinds:
        differences.append("stored pixels")
    if ours["bytes"] and other["bytes"] and abs(ours["bytes"] / other["bytes"] - 1) > ALIKE:
        differences.append("stored bytes")
    if ours["side"]["output"] != other["side"]["output"]:
        differences.append("output")
    return ", ".join(differences)


def print_pairs(rates: dict[str, list[float]], cpu_rates: dict[str, list[float]], answers: dict) -> None:
    """Print both sides of each pair, and their ratios in one round."""
    measured = [pair for pair in PAIRS if {pair[1], pair[2]} <= rates.keys()]
    for name in dict.fromkeys(name for pair in measured for name in pair[1:3]):
        print(describe_side(name, answers[name]))
    print("\n| pair | rows | by CPU time | by time | aim | work differs in |\n|---|---|---|---|---|---|")
    for title, row, reference, aim in measured:
        spreads = []
        for figures in (cpu_rates, rates):
            ratios = rounds.divide(figures[row], figures[reference])
            spreads.append(rounds.spread(ratios, ".2f", "x"))
        differences = list_differences([answers[row], answers[reference]]) or "the kernel"
        cells = [title, f"{row} / {reference}", *spreads, str(aim or "-"), differences]
        print(f"| {' | '.join(cells)} |", flush=True)


@entry
def main() -> None:
    names = tuple(dict.fromkeys(name for pair in PAIRS for name in pair[1:3]))
    options = loaders.parse_args(__doc__, names)
    record = rounds.Record()
    with rounds.conditions(), tempfile.TemporaryDirectory() as temporary:
        for title, folder in loaders.make_images(temporary, options):
            answers: dict[str, dict] = {}
            rates, cpu_rates = loaders.measure(title, folder, options, answers)
            print_pairs(rates, cpu_rates, answers)
            sides = {name: answers[name]["side"] for name in rates}
            record.add(title, "images/CPU s", cpu_rates, sides=sides)
    record.write(options.json)


if __name__ == "__main__":
    main()
