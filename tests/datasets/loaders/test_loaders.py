"""All engines and stores give the same samples and boxes and nearly the same pixels, and leave nothing."""

import argparse
import errno
import functools
import io
import os
import pickle
import re
import subprocess
import threading
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.loaders.backends import SyntheticIndex
from datasets.loaders.engines import crops as cropping
from datasets.loaders.engines.crops import Crops
from datasets.loaders.image_folders import progressive_size
from datasets.sampling.augment import center_crop, random_resized_crop
from datasets.stores import forms, pack
from datasets.stores.files import FileStore, scaled
from tests.conftest import LONGEST, ROOT, finish, start, wait_until
from tests.support import pictures, tars
from tests.support.receipts import sums_of

CPU = torch.device("cpu")
BACKENDS = ["pytorch", "threads", pytest.param("dali", marks=pytest.mark.skipif(
    backends.reasons(CPU)["dali"] is not None, reason=f"{backends.reasons(CPU)['dali']}"
))]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_packs():
    """Scale the images of packs down, as those of real data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "SHORT_SIDE", 128)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pictures.make(tmp_path_factory.mktemp("images"), 40, 21, all_kinds=True)


@pytest.fixture(scope="module")
def index(folder, tmp_path_factory):
    return image_folder.load(str(folder), "train", str(tmp_path_factory.mktemp("cache")))


def plan_of(index, batch=8, rank=0, world_size=1, size=64) -> Plan:
    return Plan(
        index, BatchSampler(len(index), batch, 7, rank=rank, world_size=world_size), random_resized_crop, size
    )


def epoch_of(loader, epoch=1, start_step=0, steps=None):
    """Return (images uint8 [n, 3, s, s], labels) of the steps, and the receipt's sums."""
    loader.seek((epoch - 1) * len(loader) + start_step)
    batches = []
    for number, (images, labels) in enumerate(loader):
        assert images.dtype == torch.float32 and images.is_contiguous(memory_format=torch.channels_last)
        batches.append((pictures.to_pixels(images), labels.clone()))
        if steps and number + 1 == steps:
            break
    return batches, torch.from_numpy(loader.receipt.take())


@pytest.fixture(scope="module")
def reference(index):
    """Return the receipt's sums of epoch 1, computed from the plan."""
    return sums_of(plan_of(index))


@pytest.fixture(scope="module")
def packs(index, folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("packs")
    made = {form: pack.build(index, str(root / form), form) for form in forms.FORMS}
    shards = image_folder.load(tars.from_folder(folder, root, 3), "train", str(root / "cache"))
    return made | {"files": FileStore(index), "tars": FileStore(shards)}


@pytest.mark.parametrize("room", [1, 40_000, 2**23])
def test_threads_decode_the_images_of_a_task_before_they_resize_them(room, index, monkeypatch):
    """They decode as many as fit into their memory, at least one. The pixels are those of one at a time."""
    monkeypatch.setattr(cropping, "_DECODED", room)
    done = []
    engine = cropping.Threads(FileStore(index), 1)
    crops, plan = engine._crops, plan_of(index)
    cut, fit = crops.cut, crops.fit
    monkeypatch.setattr(crops, "cut", lambda row, *rest: done.append("decode") or cut(row, *rest))
    monkeypatch.setattr(crops, "fit", lambda ready: done.append(len(ready)) or fit(ready))
    for batch, images in engine.run(plan):
        assert torch.equal(images, Crops(engine.store)(batch))
    engine.close()
    resized = [number for number in done if number != "decode"]
    assert sum(resized) == done.count("decode") == 40
    assert set(resized) == {8} if room == 2**23 else min(resized) == 1


@pytest.mark.parametrize("form", ["files", "tars", *forms.FORMS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_engine_and_store_gives_the_same_data_and_the_pixels_of_pillow(
    backend, form, index, packs, reference
):
    """The reference is decoded, cropped and resized by Pillow with antialiasing, also for grey, CMYK, palette
    and rotated images. For a pack of smaller images it is cropped from the stored pixels."""
    plan = plan_of(index, size=96)
    with backends.build(backend, packs[form], plan, CPU, 2) as loader:
        batches, sums = epoch_of(loader)
        assert torch.equal(sums, reference) and len(batches) == len(loader) == 5
        again, _ = epoch_of(loader)
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, again, strict=True))
    plan.seek(0)
    worst_ratio, means = float("inf"), []
    for planned, (images, labels) in zip(plan, batches, strict=True):
        assert labels.tolist() == index.labels[planned.ids].tolist()
        for row, id in enumerate(planned.ids):
            top, left, height, width, flip = (int(column[row]) for column in planned.crops)
            box = top, left, height, width
            if form not in ("files", "tars", "encoded"):  # packs of other pixels
                image = Image.fromarray(packs[form].image(id))
                box = scaled(*box, image.height / int(index.heights[id]), image.height, image.width)
            else:
                file = io.BytesIO(packs["files"].portable(id, packs["files"].content(id)))
                image = Image.open(file).convert("RGB")
            top, left, height, width = box
            image = image.crop((left, top, left + width, top + height))
            expected = np.asarray(image.resize((96, 96), Image.Resampling.BILINEAR), dtype=np.float64)
            expected = expected[:, ::-1] if flip else expected
            difference = np.abs(images[row].permute(1, 2, 0).numpy() - expected)
            means.append(difference.mean())
            worst_ratio = min(worst_ratio, 10 * np.log10(255**2 / max(1e-9, (difference**2).mean())))
    assert max(means) < 2 and worst_ratio >= 30, (max(means), worst_ratio)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_ending_changes_no_pixel(backend, tmp_path):
    """This holds for files and for packs of all forms. ImageNet has a PNG that is named .JPEG."""
    whole = Image.fromarray(load_sample_images().images[0])
    found = []
    for endings in (
        ("png", "webp", "gif", "bmp", "jpeg", "jpg", "tif"),
        ("JPEG", "jpg", "JPG", "png", "png", "bmp", "jpg"),
    ):
        root = tmp_path / endings[0]
        root.mkdir()
        kinds = ("PNG", "WEBP", "GIF", "BMP", "JPEG", "JPEG", "TIFF")
        for number, (kind, ending) in enumerate(zip(kinds, endings, strict=True)):
            image = whole.crop((0, 0, 90 + number, 70)).convert("CMYK" if number == 5 else "RGB")
            image.save(root / f"{number}.{ending}", kind)
        (root / "train.txt").write_text(
            "".join(f"{path.name} {int(path.name[0]) % 2}\n" for path in root.iterdir())
        )
        index = image_folder.load(str(root), "train", str(tmp_path / "cache"))
        stores = [FileStore(index), *(pack.build(index, str(root / form), form) for form in forms.FORMS)]
        for store in stores:
            with backends.build(backend, store, plan_of(index, batch=7), CPU, 1) as loader:
                [(images, _)], sums = epoch_of(loader)
                found.append((index.fingerprint, images, sums))
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1]) and torch.equal(one[2], other[2])


def test_the_backend_may_change_in_the_middle_of_an_epoch(index, packs, reference):
    """The epoch continues at that step with another backend and another form of data."""
    with backends.build("dali" if backends.reasons(CPU)["dali"] is None else "pytorch", packs["files"],
                       plan_of(index), CPU, 2) as first:  # fmt: skip
        begun = epoch_of(first, steps=2)[1]
    with backends.build("threads", packs["encoded"], plan_of(index), CPU, 2) as second:
        rest = epoch_of(second, start_step=2)[1]
    assert torch.equal(torch.cat([begun, rest]), reference)


@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_deliver_parts_of_the_training_and_of_an_evaluation_that_does_not_divide(
    backend, folder, index, reference, tmp_path
):
    total = torch.zeros_like(reference)
    for rank in range(2):
        plan = plan_of(index, rank=rank, world_size=2)
        with backends.build(backend, FileStore(index), plan, CPU, 1) as loader:
            total += epoch_of(loader)[1]
    assert torch.equal(total, reference)
    val = image_folder.load(str(folder), "val", str(tmp_path))
    seen = []
    for rank in range(2):
        plan = Plan(val, SequentialBatchSampler(len(val), 4, rank=rank, world_size=2), center_crop, 32)
        with backends.build(backend, FileStore(val), plan, CPU, 1) as loader:
            for _ in range(2):  # a second evaluation equals the first
                batches = [labels.clone() for _, labels in loader]
            assert [len(each) for each in batches] == ([4, 4, 2] if rank == 0 else [4, 4, 3])
            seen += torch.cat(batches).tolist()
    assert seen == val.labels.tolist()


def test_images_grow_with_the_epochs(index, packs):
    sizes = functools.partial(progressive_size, 10, 32, 96)
    assert [sizes(epoch) for epoch in range(1, 11)] == [32] * 7 + [64, 96, 96]
    assert progressive_size(90, None, 224, 1) == 224
    ffcv = [progressive_size(16, 160, 192, epoch) for epoch in (1, 11, 12, 13, 14, 16)]
    assert ffcv == [160, 160, 160, 192, 192, 192]
    for backend in ("pytorch", "threads", "dali", "synthetic"):
        if backends.reasons(CPU)[backend]:
            continue
        with backends.build(backend, packs["decoded"], plan_of(index, size=sizes), CPU, 2) as loader:
            for epoch in (9, 8, 1):
                (images, _), *_ = epoch_of(loader, epoch, steps=1)[0]
                assert images.shape[2:] == (sizes(epoch),) * 2, backend


def test_abandoned_epochs_leave_no_batch_for_the_next(index, packs, reference):
    for backend in ("pytorch", "threads", "dali"):
        if backends.reasons(CPU)[backend]:
            continue
        with backends.build(backend, packs["files"], plan_of(index), CPU, 2) as loader:
            for steps in (1, 3):
                epoch_of(loader, epoch=2, steps=steps)
            assert torch.equal(epoch_of(loader)[1], reference), backend


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_that_went_bad_is_named(backend, folder, tmp_path):
    """After the scan the file is cut, which its size shows, or gets other bytes of the same length."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    index = image_folder.load(str(copy), "train", str(tmp_path / "cache"))
    victim = Path(index.path(11))
    good = victim.read_bytes()
    noise = os.urandom(len(good))
    for content, reason in ((good[:-100], "bytes"), (noise, "changed")):
        victim.write_bytes(content)
        with backends.build(backend, FileStore(index), plan_of(index), CPU, 2) as loader:
            with pytest.raises(BadInput, match=rf"{reason}.*{victim.name}|{victim.name}.*{reason}"):
                epoch_of(loader)
            victim.write_bytes(good)
            assert len(epoch_of(loader)[0]) == 5, "the next epoch is whole"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_behind(backend, index, packs):
    def held():
        memory = {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}
        return {child.pid for child in psutil.Process().children(recursive=True)} | memory

    threads, before = threading.active_count(), held()
    loader = backends.build(backend, packs["files"], plan_of(index), CPU, 2)
    epoch_of(loader, steps=2)
    loader.close()
    wait_until(lambda: threading.active_count() <= threads and not held() - before)


SCRIPT = """
import sys, torch
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.stores.files import FileStore

if __name__ == "__main__":
    index = image_folder.load(sys.argv[1], "train", sys.argv[2])
    plan = Plan(index, BatchSampler(len(index), 8, 0), random_resized_crop, 64)
    loader = backends.build("pytorch", FileStore(index), plan, torch.device("cpu"), 2)
    for epoch in range(10**6):
        loader.seek(epoch * len(loader))
        for images, labels in loader:
            print("step", flush=True)
"""


def test_workers_end_with_a_killed_process(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}")
    process = start(script, folder, tmp_path / "cache")
    assert any("step" in line for line in process.stdout)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    finish(process, None)
    _, alive = psutil.wait_procs(children, timeout=LONGEST)
    assert not alive


# names


def test_other_spellings_and_what_is_not_there():
    assert backends.resolve("syntetic", CPU) == "synthetic"
    with pytest.raises(BadInput, match=r"data_backend nonsense: .* available here: pytorch, "):
        backends.resolve("nonsense", CPU)
    with pytest.raises(BadInput, match=r"dali-gpu: .*GPU; available here: .*threads"):
        backends.resolve("dali-gpu", CPU)


def test_synthetic_has_the_plan_s_labels_and_no_receipt_of_real_data(index, reference):
    with backends.build("synthetic", None, plan_of(index), CPU) as loader:
        batches, sums = epoch_of(loader)
    assert len(batches) == 5 and not torch.equal(sums, reference)
    big = SyntheticIndex(1_281_167, "train")
    with backends.build("synthetic", None, plan_of(big, batch=16), CPU) as loader:
        images, _ = next(iter(loader))
        assert images.shape == (16, 3, 64, 64)


def test_the_fastest_is_measured(index, packs):
    found = backends.rates(packs["files"], plan_of(index), CPU, 2, seconds=0.2)
    here = {name for name, reason in backends.reasons(CPU).items() if not reason}
    assert set(found) == here - {"synthetic"} and all(rate > 0 for rate in found.values())
    assert "threads" in backends.text(found)


# packs


def damaged(store: pack.PackStore) -> list[int]:
    """Return the ids of the stored samples whose checksum is another one."""
    rows = ((id, *store.stored(id)) for id in range(len(store.index)))
    return [id for id, sample, checksum in rows if zlib.crc32(sample.content) != checksum]


def test_a_pack_is_used_again_and_never_for_other_data(index, folder, tmp_path, capfd):
    path = str(tmp_path / "pack")
    pack.build(index, path)
    parts = {name: os.stat(os.path.join(path, name)).st_mtime_ns for name in os.listdir(path)}
    assert not [name for name in parts if name.endswith(".partial")]
    assert not damaged(pack.build(index, path))
    assert {name: os.stat(os.path.join(path, name)).st_mtime_ns for name in os.listdir(path)} == parts
    val = image_folder.load(str(folder), "val", str(tmp_path / "cache"))
    assert len(pack.build(val, path).index) == 21, "it is built again"


def test_a_pack_that_was_interrupted_goes_on(index, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "SAMPLES_PER_FILE", 8)
    path, write, written = str(tmp_path / "pack"), pack._write_part, []

    def failing(part, *rest):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(part)
        write(part, *rest)

    monkeypatch.setattr(pack, "_write_part", failing)
    with pytest.raises(BadInput, match=r"cannot write the pack .* No space left"):
        pack.build(index, path)
    monkeypatch.setattr(pack, "_write_part", lambda part, *rest: (written.append(part), write(part, *rest)))
    assert not damaged(pack.build(index, path))
    assert len(written) == len(set(written)) == 5, "no part twice"


def test_a_flipped_bit_in_a_pack_is_found_and_the_sample_is_read_from_its_file(index, tmp_path, capfd):
    for form in forms.FORMS:
        path = str(tmp_path / form)
        expected = [pack.build(index, path, form).image(id).copy() for id in range(len(index))]
        part = Path(path) / "000000.arrow"
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 4
        part.write_bytes(content)
        assert len(damaged(pack.PackStore(path, index, form))) == 1
        store = pickle.loads(pickle.dumps(pack.build(index, path, form)))
        capfd.readouterr()
        for _ in range(2):
            assert all(np.array_equal(store.image(id), expected[id]) for id in range(len(index)))
        said = capfd.readouterr().err
        assert len(re.findall(rf"^warning: the pack {path} is damaged: {index.base}", said, re.M)) == 1


def test_a_pack_whose_parts_have_other_sizes_is_mended(index, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "SAMPLES_PER_FILE", 8)
    path = tmp_path / "pack"
    expected = pack.build(index, str(path)).image(9).copy()
    parts = sorted(path.glob("*.arrow"))
    content = parts[1].read_bytes()
    damages = {
        "empty": lambda: parts[1].write_bytes(b""),
        "cut": lambda: parts[1].write_bytes(content[:-100]),
        "missing": parts[1].unlink,
        "trailing": lambda: parts[1].write_bytes(content + b"x"),
    }
    for name, damage in damages.items():
        damage()
        made = [os.stat(part).st_mtime_ns for part in parts if part != parts[1]]
        with monkeypatch.context() as patch:
            patch.setattr(pack, "locked", read_only)
            with pytest.raises(BadInput, match=r"cannot write the pack .*: Read-only file system"):
                pack.build(index, str(path))
        (path / ".partial-1").touch()  # of a process that was killed
        assert np.array_equal(pack.build(index, str(path)).image(9), expected), name
        assert [os.stat(part).st_mtime_ns for part in parts if part != parts[1]] == made
        assert sorted(path.iterdir()) == [*parts, path / "meta.json"]
    monkeypatch.setattr(pack, "locked", read_only)  # it is not needed for a whole pack
    assert np.array_equal(pack.build(index, str(path)).image(9), expected)


def read_only(path):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_pack_without_room_is_refused_with_sizes(index, tmp_path, monkeypatch):
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda path: argparse.Namespace(free=10))
    with pytest.raises(BadInput, match=r"\b40 images .*0\.\d\d GB at .*, 0\.00 GB .*free"):
        pack.build(index, str(tmp_path / "pack"))
