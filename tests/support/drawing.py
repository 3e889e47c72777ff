"""Draw the way of a batch from a file to the model, for the guides.

python -m tests.support.drawing      writes guides/batch.png
"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "guides" / "batch.png"

# title, module, what it gives to the next one
WAY = (
    ("sampler", "datasets/sampling/sampler.py", "ids of the step, a function of (seed, epoch, step)"),
    ("augmentation plan", "datasets/sampling/augment.py", "box and flip of each id"),
    ("store", "datasets/stores/tiers.py", "bytes or pixels: pack, then shared cache, then file"),
    ("engine", "datasets/loaders/engines/", "uint8 [n, H, W, 3], decoded, cropped, resized"),
    ("loader", "datasets/loaders/loader.py", "float [n, 3, H, W] on the device, normalised"),
    ("your step", "jobs/*.py", "loss, gradients, weights"),
)
ASIDE = (  # number of the box on the way, title, module
    (1, "receipt", "datasets/sampling/receipt.py"),
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


if __name__ == "__main__":
    draw(PICTURE)
