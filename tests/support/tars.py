"""Write tar files of WebDataset's layout."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    """Write a tar of (name, content), in this order, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def from_folder(source: Path, target: Path, count: int, with_cls: bool = False) -> str:
    """Write the images of <source>/{train,val}/<class> into `count` tars of each split, in the order of their
    paths, and return their pattern. with_cls: the label is a .cls next to the image, not its folder."""
    for split in ("train", "val"):
        images = sorted(path for path in (source / split).rglob("*") if path.is_file())
        classes = sorted({path.parent.name for path in images})
        for number in range(count):
            files: list[tuple[str, bytes]] = []
            for place in range(len(images) * number // count, len(images) * (number + 1) // count):
                path = images[place]
                if with_cls:
                    files.append((f"{place:06}.cls", str(classes.index(path.parent.name)).encode()))
                    files.append((f"{place:06}{path.suffix}", path.read_bytes()))
                else:
                    files.append((f"{path.parent.name}/{path.name}", path.read_bytes()))
            write(target / f"images-{split}-{number:03}.tar", files)
    return str(target / "*.tar")
