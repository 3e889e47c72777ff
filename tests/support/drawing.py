"""Draw the pictures of the guides.

python -m tests.support.drawing                  writes guides/batch.png: the way of a batch to the model
python -m tests.support.drawing WHOLE KILLED 60  writes guides/report.png: two runs, one killed at step 60

Both runs are `jobs/train_ddp.py --dataset digits --width 32 --epochs 12 --report_every 4`: WHOLE on two
processes, KILLED with `--save_every 11`, killed after step 60 and resumed with `--processes_per_node 1`.
"""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "guides" / "batch.png"

# title, module, what it gives to the next one
WAY = (
    ("sampler", "bootfile/sampling/sampler.py", "ids of the step, a function of (seed, epoch, step)"),
    ("augmentation plan", "datasets/sampling/augment.py", "box and flip of each id"),
    ("store", "datasets/stores/tiers.py", "bytes or pixels: pack, then shared cache, then file"),
    ("engine", "datasets/loaders/engines/", "uint8 [n, H, W, 3], decoded, cropped, resized"),
    ("loader", "bootfile/loaders/loader.py", "float [n, 3, H, W] on the device, normalised"),
    ("your step", "jobs/*.py", "loss, gradients, weights"),
)
ASIDE = (  # number of the box on the way, title, module
    (1, "receipt", "bootfile/receipt/receipt.py"),
    (4, "effects, mixup", "datasets/sampling/effects.py"),
)
_BLUE, _GREEN, _LINE = "#dbe9f8", "#dff1e0", "#33475b"


def draw(path: Path) -> None:
    """Write the picture: boxes from top to bottom, black on white."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.6, 6.4), facecolor="white")
    for number, (title, module, result) in enumerate(WAY):
        top = -number
        _box(axes, 0.0, top, title, module, _BLUE)
        axes.annotate(
            "", (0.9, top - 1.0), (0.9, top - 0.55), arrowprops={"arrowstyle": "->", "color": _LINE}
        )
        axes.text(1.0, top - 0.79, result, fontsize=8, color=_LINE, va="center")
    for number, title, module in ASIDE:
        _box(axes, 3.1, -number, title, module, _GREEN)
        arrow = {"arrowstyle": "->" if number == 1 else "<-", "color": _LINE}
        axes.annotate("", (3.1, -number - 0.27), (1.8, -number - 0.27), arrowprops=arrow)
    axes.text(0.9, -len(WAY) - 0.12, "next step", fontsize=8, color=_LINE, ha="center")
    axes.set(xlim=(-0.05, 5.0), ylim=(-len(WAY) - 0.3, 0.1))
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


def _box(axes: Axes, left: float, top: float, title: str, module: str, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (left, top - 0.55), 1.8, 0.55, "round,pad=0,rounding_size=0.06", fc=colour, ec=_LINE
    )
    axes.add_patch(shape)
    axes.text(left + 0.9, top - 0.18, title, fontsize=10, weight="bold", ha="center", va="center")
    axes.text(left + 0.9, top - 0.40, module, fontsize=7, family="monospace", ha="center", va="center")


def draw_runs(whole: Path, killed: Path, killed_at: int, path: Path) -> None:
    """Write the losses and accuracies of two runs: a thick line, and a thin one on it with its kill."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 3.4), facecolor="white")
    for axes, name in zip(both, ("loss", "acc"), strict=True):
        first = read_points(killed, name)
        axes.plot(*read_points(whole, name), color="#9ecae1", linewidth=7, label="whole run, 2 processes")
        axes.plot(*first, color="#a63603", linewidth=1.5, label="killed run, 2 processes, then 1")
        axes.axvline(killed_at, color=_LINE, linestyle=":")
        axes.text(killed_at + 2, axes.get_ylim()[0], " SIGKILL", color=_LINE, va="bottom")
        axes.set(xlabel="step", title={"loss": "training loss", "acc": "training accuracy"}[name])
    both[0].legend()
    figure.savefig(path, dpi=100, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


def read_points(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a figure of the training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in points], [value for _, value in points]


if __name__ == "__main__":
    if sys.argv[1:]:
        draw_runs(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), PICTURE.with_name("report.png"))
    else:
        draw(PICTURE)
