"""KSpeed's calls return the bytes of the files from every tier, whatever fails, also as a source of DALI."""

import functools
import io
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from bootfile.ground.errors import BadInput
from datasets.compat.kspeed import KSpeedCallable, KSpeedFolder, KSpeedImageFolder
from datasets.loaders import backends
from datasets.stores import connection, pack
from tests.conftest import names
from tests.support import pictures
from tests.support.redis_server import (
    PASSWORD,
    RIGHTS,
    RedisServer,
    files_with,
    needed,
    patient,  # noqa: F401
    until,
    with_user,
)

pytest.importorskip("redis", reason="redis-py is not installed")

MISSING = backends.reasons(torch.device("cpu"))["dali"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a data set with files that an index leaves out (hidden, cut), and one in a deeper folder."""
    root = pictures.make(tmp_path_factory.mktemp("images"), 27, 6)
    first = root / "train" / "class_0" / "000.jpg"
    shutil.copy(first, first.with_name(".hidden.jpg"))
    first.with_name("cut.jpg").write_bytes(first.read_bytes()[:3000])
    (first.parent / "deeper").mkdir()
    shutil.copy(first, first.parent / "deeper" / "one.jpg")
    return root


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("index"))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restore the environment variable that a password of a script changes."""
    monkeypatch.setenv(connection.PASSWORD, "")
    monkeypatch.delenv(connection.PASSWORD)


def whole(folder) -> list[str]:
    """Return the files below a folder that can be decoded."""
    return [os.fspath(path) for path in sorted(Path(folder).rglob("*.jpg")) if path.name != "cut.jpg"]


def right(folder: KSpeedFolder, paths) -> bool:
    return folder.getbatch(paths) == [Path(path).read_bytes() for path in paths]


def is_cached(folder: KSpeedFolder) -> bool:
    """Return whether all samples are on the server."""
    return all(sample is not None for sample in folder._store.cache.read(range(len(folder))))


def is_packed(folder: KSpeedFolder) -> bool:
    return isinstance(folder._store, pack.PackStore)


TO_TENSOR = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor()])


@needed
@pytest.mark.parametrize("place", ["list", "text", "url", "packs", "files"])
def test_it_is_torchvisions_image_folder(place, images, cache_dir, empty_redis, tmp_path, monkeypatch):
    """Files, order and pixels are equal from every place, and the second epoch is read from memory."""
    host = f"127.0.0.1:{empty_redis.port}"
    iplist = {
        "list": [host], "text": f" {host} ", "url": f"redis://{host}?form=decoded",
        "packs": str(tmp_path / "packs"), "files": None,
    }[place]  # fmt: skip
    monkeypatch.chdir(images.parent)
    root = f"{images.name}/train"  # relative, like ImageFolder's paths
    expected, said = ImageFolder(root, TO_TENSOR), []
    options = {"cache_dir": cache_dir, "log": said.append}
    found = KSpeedImageFolder(root, None, 2, iplist, None, None, TO_TENSOR, **options)
    assert ["without iplist: " in line for line in said] == [True] * (place == "files")
    for name in ("classes", "class_to_idx", "samples", "targets", "imgs"):
        assert getattr(found, name) == getattr(expected, name), name
    assert len(found) == len(expected) == 30 and isinstance(found, ImageFolder)
    usable = [number for number, (path, _) in enumerate(found.samples) if not path.endswith("cut.jpg")]
    has_server, hits = place in ("list", "text", "url"), empty_redis.client().info("stats")["keyspace_hits"]
    for _ in range(2):
        for number in usable:
            (image, label), (image_too, label_too) = found[number], expected[number]
            assert torch.equal(image, image_too) and label == label_too
        if has_server:
            until(lambda: empty_redis.client().dbsize() >= 28)
    known = len(usable) - 1  # without the hidden file
    assert is_packed(found.folder) == (place == "packs")
    if has_server:
        assert empty_redis.client().info("stats")["keyspace_hits"] >= hits + known
    with pytest.raises(OSError):
        found[[path.endswith("cut.jpg") for path, _ in found.samples].index(True)]
    found.folder.close()
    assert torch.equal(found[usable[0]][0], expected[usable[0]][0]), "it also reads after close()"
    if has_server:
        assert empty_redis.client().dbsize() == 0, "the mode was active"


@needed
def test_in_the_workers_of_a_data_loader(images, cache_dir, tmp_path):
    """It works in workers, with user and password in the order of KSpeed's documentation."""
    options = "user default off", f"user admin on >{PASSWORD} {RIGHTS}"
    with RedisServer(tmp_path, *options) as server:
        hosts = [f"127.0.0.1:{server.port}"]
        found = KSpeedImageFolder(
            images / "val", None, 2, hosts, "admin", PASSWORD, TO_TENSOR, cache_dir=cache_dir
        )
        expected = [ImageFolder(images / "val", TO_TENSOR)[number][0] for number in range(6)]
        loader = DataLoader(found, 4, num_workers=1, persistent_workers=True)
        client = server.client(username="admin", password=PASSWORD)
        cache = found.folder._store.cache
        for _ in range(2):
            batches, labels = zip(*loader, strict=True)
            assert torch.equal(torch.cat(batches), torch.stack(expected))
            assert torch.cat(labels).tolist() == found.targets
            until(lambda: (cache.lengths(range(6)) > 0).all())
        assert client.execute_command("INFO", "stats")["keyspace_hits"] >= 6
        found.folder.close()


def test_the_calls_of_a_folder(images, cache_dir, monkeypatch, tmp_path):
    packs = str(tmp_path / "packs")
    folder = KSpeedFolder(images / "train", 1, packs, cache_dir=cache_dir)
    assert len(folder) == 28, "without the hidden and the cut one"
    path = images / "train" / "class_1" / "004.jpg"
    content = path.read_bytes()
    monkeypatch.chdir(images / "train")
    relative = KSpeedFolder("../train", 1, packs, cache_dir=cache_dir)
    monkeypatch.chdir("/")
    for source, name in (
        (folder, path), (folder, str(path)), (folder, "class_1/004.jpg"),
        (folder, "./class_1//004.jpg"), (relative, "class_1/004.jpg"),
        (relative, "../train/class_1/004.jpg"), (relative, path),
    ):  # fmt: skip
        assert source.getBIN(name) == content and source.size(name) == len(content)
    assert is_packed(folder) and is_packed(relative)
    assert len(list(Path(packs).glob("train-*.pack"))) == 1
    array = folder.get(path)
    assert array.dtype == np.uint8 and array.tobytes() == content
    assert np.array_equal(folder.getPIL(path), Image.open(path).convert("RGB"))
    names = whole(images)[::-1]  # those of val/ are read from the disk
    assert right(folder, names * 2)
    own = [name for name in whole(images / "train") if ".hidden" not in name]
    assert folder.size() == sum(map(os.path.getsize, own))
    cut = images / "train" / "class_0" / "cut.jpg"
    assert folder.getBIN(cut) == cut.read_bytes() and folder.size(cut) == 3000
    assert folder.getBIN(__file__) == Path(__file__).read_bytes(), "even of another folder"
    for call in (folder.getBIN, folder.size):
        with pytest.raises(FileNotFoundError):
            call("class_1/nothing.jpg")
    copy = pickle.loads(pickle.dumps(folder))
    assert right(copy, names) and is_packed(copy)


# what fails


def test_wrong_arguments(images, cache_dir):
    for iplist, reason in (
        (["a:b"], "iplist is not redis://"),
        (["a", "b"], "iplist is not redis://"),
        ("redis://u:SECRET@h", "password"),
        ("http://h", "is not"),
    ):
        with pytest.raises(BadInput, match=reason) as caught:
            KSpeedFolder(images / "train", 1, iplist, cache_dir=cache_dir)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(BadInput, match=f"such as {images}/train"):
        KSpeedFolder(images, cache_dir=cache_dir)
    with pytest.raises(BadInput, match="does not exist"):
        KSpeedFolder(images / "nothing")


# the password


@needed
def test_the_documented_call_with_every_kind_of_server(images, cache_dir, tmp_path, capsys):
    """KSpeedImageFolder(traindir, None, workers, iplist, "admin", "admin", transforms) works."""
    admin = "user admin on >{} " + RIGHTS
    for number, (options, line) in enumerate((
        ((), "user default"),
        (("requirepass admin",), "user default"),
        (("user default off", admin.format("admin")), ""),
        (("requirepass other", admin.format("admin")), ""),
        (("requirepass other",), None),
        (("user default off", admin.format("other")), None),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        os.environ.pop(connection.PASSWORD, None)
        with RedisServer(folder, *options) as server:
            iplist = [f"127.0.0.1:{server.port}"]

            call = functools.partial(KSpeedImageFolder, images / "val", None, 2, iplist, "admin", "admin")
            if line is None:
                with pytest.raises(BadInput, match="refuses the user"):
                    call(TO_TENSOR, cache_dir=cache_dir)
                continue
            found = call(TO_TENSOR, cache_dir=cache_dir)
            copy = pickle.loads(pickle.dumps(found))
            for each in (found, found, copy):
                assert right(each.folder, whole(images / "val"))
                until(lambda folder=found.folder: is_cached(folder))
            said = [text for text in capsys.readouterr().out.splitlines() if "cache" in text]
            assert len(said) == bool(line) and all(names(text, iplist[0], "refuses", line) for text in said)
            found.folder.close()
    dead = call(TO_TENSOR, cache_dir=cache_dir)
    assert right(dead.folder, whole(images / "val")) and "Connection refused" in capsys.readouterr().out


@needed
def test_a_password_is_nowhere(images, cache_dir, tmp_path, capsys, monkeypatch):
    with with_user(tmp_path) as server:
        hosts = [f"127.0.0.1:{server.port}"]
        found = KSpeedImageFolder(images / "val", None, 1, hosts, "bootfile", PASSWORD, cache_dir=cache_dir)
        source = KSpeedCallable(images / "val", 2, 0, 1, 1, hosts, "bootfile", PASSWORD, cache_dir=cache_dir)
        until(lambda: right(found.folder, whole(images / "val")) and is_cached(found.folder))
        seen = [repr(found), repr(vars(found)), repr(vars(found.folder)), repr(source), repr(vars(source))]
        seen += [str(pickle.dumps(found)), str(pickle.dumps(source))]
        monkeypatch.delenv(connection.PASSWORD)
        with pytest.raises(BadInput, match="refuses the user") as caught:
            KSpeedFolder(images / "val", 1, hosts, "bootfile", f"not {PASSWORD}", cache_dir=cache_dir)
        seen.append(str(caught.value))
        # the environment overrides the script, which can keep its "admin"
        monkeypatch.setenv(connection.PASSWORD, PASSWORD)
        url = server.url("bootfile")
        other = KSpeedFolder(images / "val", 1, url, "admin", "admin", cache_dir=cache_dir)
        assert right(other, whole(images / "val")) and is_cached(other)
        server.kill()
        assert right(other, whole(images / "val"))
        seen += capsys.readouterr()
        for each in (found.folder, source.folder, other):
            each.close()
    assert not [text for text in seen if PASSWORD in text] and files_with(PASSWORD, cache_dir) == []


# DALI


class Info:
    """A stand-in for DALI's SampleInfo and BatchInfo."""

    def __init__(self, iteration, epoch, batch_size=None, number=None):
        self.iteration, self.epoch_idx = iteration, epoch
        if number is not None:
            self.idx_in_batch, self.idx_in_epoch = number, iteration * batch_size + number


@pytest.fixture
def good(images, tmp_path):
    """Return a folder without the cut file and the hidden file."""
    root = tmp_path / "good"
    shutil.copytree(images / "train", root, ignore=shutil.ignore_patterns("cut.jpg", ".hidden.jpg"))
    return root


def sources(good, cache_dir, shards, batch_size, **options):
    return [
        KSpeedCallable(
            good, batch_size, shard, shards, 1, str(good.parent / "packs"), cache_dir=cache_dir, **options
        )
        for shard in range(shards)
    ]


def batches_of(source, epoch) -> list[list[tuple[bytes, int]]]:
    """Return the batches that DALI would get in an epoch. They are complete."""
    found = []
    try:
        while True:
            infos = [Info(len(found), epoch, source.batch_size, row) for row in range(source.batch_size)]
            samples = [source(info) for info in infos]  # not map(), which would end at StopIteration
            found.append([(sample.tobytes(), int(label[0])) for sample, label in samples])
    except StopIteration:
        return found


def test_a_source_is_right_at_the_ends_of_epochs(good, cache_dir):
    """No sample comes twice, with any number of shards."""
    of_shards = []
    for shards in (1, 2, 3):
        parts, epochs = sources(good, cache_dir, shards, 6 // shards, seed=5), []
        for epoch in (0, 1, 0):
            steps = list(zip(*[batches_of(part, epoch) for part in parts], strict=True))
            epochs.append([sorted(sample for part in step for sample in part) for step in steps])
            contents = [content for step in epochs[-1] for content, _ in step]
            assert len(steps) == 28 // 6 and len({*contents}) >= len(contents) - 1, "one file is a copy"
        assert epochs[0] == epochs[2] != epochs[1]
        of_shards.append(epochs)
    assert of_shards[0] == of_shards[1] == of_shards[2], "a step is the same in any number of shards"
    (other,) = sources(good, cache_dir, 1, 6, seed=6)
    assert batches_of(other, 0)[0] != batches_of(parts[0], 0)[0]
    (ordered,) = sources(good, cache_dir, 1, 28, shuffle=False)
    paths, index = [], ordered.index
    for (content, label), id in zip(batches_of(ordered, 3)[0], range(28), strict=True):
        paths.append(index.path(id))
        assert label == index.labels[id]
        if index.plain[id]:
            assert content == Path(paths[-1]).read_bytes()
        else:
            pixels = np.asarray(Image.open(io.BytesIO(content)))
            assert content.startswith(b"\x89PNG") and pixels.shape[2] == 3
    assert paths == sorted(whole(good))


def test_a_source_that_does_not_fit_its_pipeline(good, images, cache_dir):
    (source,) = sources(good, cache_dir, 1, 6)
    with pytest.raises(BadInput, match="another batch_size than 6"):
        source(Info(1, 0, 8, 2))
    with pytest.raises(BadInput, match="batch=False"):
        source(Info(1, 0))
    with pytest.raises(BadInput, match="1 of 29 images"):
        KSpeedCallable(images / "train", 4, cache_dir=cache_dir, log=lambda text: None)
    with pytest.raises(BadInput, match="batch_size 0"):
        KSpeedCallable(good, 0)


@pytest.mark.thorough
@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
def test_a_source_in_dali(good, cache_dir):
    """In DALI's worker processes, every step of two epochs has the right images and labels."""
    from nvidia.dali import Pipeline, fn, types

    (source,) = sources(good, cache_dir, 1, 6, seed=3)
    pipeline = Pipeline(
        6, 2, device_id=None, py_num_workers=1, py_start_method="spawn", prefetch_queue_depth=2
    )
    with pipeline:
        contents, labels = fn.external_source(
            source, num_outputs=2, batch=False, parallel=True, dtype=[types.UINT8, types.INT32]
        )
        pipeline.set_outputs(contents, labels, fn.decoders.image(contents, output_type=types.RGB))
    pipeline.build()
    expected = KSpeedCallable(good, 6, 0, 1, 1, str(good.parent / "packs"), cache_dir=cache_dir, seed=3)
    for epoch in range(2):
        steps = batches_of(expected, epoch)
        assert len(steps) == 4
        for step in steps:
            contents, labels, images = pipeline.run()
            found = [np.array(contents[number]).tobytes() for number in range(len(step))]
            assert found == [content for content, _ in step]
            assert [int(np.array(labels[number])[0]) for number in range(len(step))] == [
                label for _, label in step
            ]
            assert len(images) == len(step)
        with pytest.raises(StopIteration):
            pipeline.run()
        pipeline.reset()
    assert is_packed(source.folder)
    del pipeline
