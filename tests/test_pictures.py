"""The pictures of the guides are small, on white, and name modules that exist."""

from pathlib import Path

import PIL.Image
import pytest

from tests.conftest import ROOT
from tests.support import drawing

PICTURES = sorted((ROOT / "guides").glob("*.png"))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_picture_is_small_and_used(path):
    assert path.stat().st_size < 100_000
    text = "".join(
        page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *ROOT.glob("guides/*.md")]
    )
    assert f"{path.name})" in text
    with PIL.Image.open(path) as image:
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_drawing_names_modules_and_can_be_drawn(tmp_path: Path):
    for module in [row[1] for row in drawing.WAY] + [row[2] for row in drawing.ASIDE]:
        assert list(ROOT.glob(module.rstrip("/"))), module
    drawing.draw(tmp_path / "batch.png")
    with PIL.Image.open(tmp_path / "batch.png") as new, PIL.Image.open(drawing.PICTURE) as stored:
        assert all(abs(a - b) < 30 for a, b in zip(new.size, stored.size, strict=True)), "fonts may differ"
