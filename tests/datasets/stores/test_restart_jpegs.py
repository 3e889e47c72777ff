"""The part of a JPEG that is decoded by its restart markers has the pixels of the whole decode."""

import contextlib
import io

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.stores import forms, pack, restart

SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "grey")


def make_image(width, height, mode="RGB", seed=0):
    """Return a part of a photograph with noise: every MCU has other colours than its neighbours."""
    photograph = Image.fromarray(load_sample_images().images[seed % 2]).resize((width, height))
    random = np.random.default_rng(seed)
    noise = random.integers(-60, 60, (height, width, 3))
    noisy = np.clip(np.asarray(photograph, np.int64) + noise, 0, 255)
    return Image.fromarray(noisy.astype(np.uint8)).convert(mode)


def save(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def draw_boxes(random, width, height, count):
    """Yield boxes: random ones, one pixel in each corner, and the whole image."""
    yield 0, 0, height, width
    for top, left in ((0, 0), (0, width - 1), (height - 1, 0), (height - 1, width - 1)):
        yield top, left, 1, 1
    for _ in range(count):
        rows = int(random.integers(1, height + 1))
        columns = int(random.integers(1, width + 1))
        top = int(random.integers(height - rows + 1))
        left = int(random.integers(width - columns + 1))
        yield top, left, rows, columns


def decode_part(content, box):
    """Return (pixels of the box, pixels that were decoded for it)."""
    part = restart.cut(content, restart.read_header(content), box)
    pixels = simplejpeg.decode_jpeg(part.content)
    assert pixels.shape[:2] == (part.height, part.width)
    top, left, height, width = box
    top, left = top - part.top, left - part.left
    return pixels[top : top + height, left : left + width], part.height * part.width


def compare(content, random, count=12):
    """Compare boxes of a JPEG with its whole decode; return the mean share of it that was decoded."""
    whole = simplejpeg.decode_jpeg(content)
    height, width, _ = whole.shape
    shares = []
    for box in draw_boxes(random, width, height, count):
        top, left, rows, columns = box
        pixels, decoded = decode_part(content, box)
        assert np.array_equal(pixels, whole[top : top + rows, left : left + columns]), box
        shares.append(decoded / (height * width))
    return np.mean(shares[5:])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_part_has_the_pixels_of_the_whole(sampling):
    random = np.random.default_rng(SAMPLINGS.index(sampling))
    sizes = [(1, 1), (7, 9), (16, 16), (17, 33), (341, 256), (256, 341), (500, 375), (368, 64), (47, 300)]
    sizes += [(int(random.integers(1, 200)), int(random.integers(1, 200))) for _ in range(40)]
    for number, (width, height) in enumerate(sizes):
        quality = int(random.integers(5, 101))
        mode = "L" if sampling == "grey" else "RGB"
        image = make_image(width, height, mode, number)
        options = "4:4:4" if sampling == "grey" else sampling
        share = compare(restart.encode(image, options, quality=quality), random)
        if min(width, height) > 250 and sampling != "grey":
            assert share < 0.75, (width, height)


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5, 8, 16, 32, 64, 1000])
def test_markers_of_other_programs_are_used_or_refused(interval):
    """The markers are a part of a row, rows, or something else, which has to be decoded as a whole."""
    random = np.random.default_rng(interval)
    for width in (128, 130, 256):
        content = save(make_image(width, 96), quality=80, restart_marker_blocks=interval)
        header = restart.read_header(content)
        columns = -(-width // header.mcu_width)
        if columns % interval and interval % columns:
            assert restart.cut(content, header, (0, 0, 4, 4)) is None
        else:
            compare(content, random)


@pytest.mark.parametrize("sampling", ["411", "440"])
def test_other_subsamplings_of_cameras(sampling):
    random = np.random.default_rng(7)
    for width, height in ((256, 128), (333, 95), (65, 41)):
        options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{sampling}")]
        pixels = np.asarray(make_image(width, height))
        content = cv2.imencode(".jpg", pixels, [*options, cv2.IMWRITE_JPEG_RST_INTERVAL, 1])[1].tobytes()
        header = restart.read_header(content)
        assert (header.mcu_width, header.mcu_height) == ((32, 8) if sampling == "411" else (8, 16))
        compare(content, random)


def test_jpegs_without_usable_markers_are_refused():
    image = make_image(128, 96)
    plain = save(image, quality=90)
    with_markers = restart.encode(image, "4:2:0", quality=90)
    header = restart.read_header(with_markers)
    assert restart.read_header(plain) is None
    assert restart.read_header(save(image, progressive=True, restart_marker_blocks=2)) is None
    assert restart.read_header(save(image.convert("CMYK"), restart_marker_blocks=2)) is None
    assert restart.read_header(b"\xff\xd8") is None and restart.read_header(b"") is None
    for length in range(header.end):
        assert restart.read_header(with_markers[:length]) is None
    box = (8, 8, 16, 16)
    assert restart.cut(with_markers + b"\0", header, box) is None
    assert restart.cut(with_markers[:-2], header, box) is None
    ends = [place for place in range(header.end, len(with_markers)) if 0xD0 <= with_markers[place] <= 0xD7]
    markers = [place for place in ends if with_markers[place - 1] == 0xFF and place > header.end]
    for place in (markers[0], markers[-1]):
        damaged = bytearray(with_markers)
        damaged[place] ^= 1  # another number
        assert restart.cut(bytes(damaged), header, box) is None
        damaged[place] = 0  # no marker
        assert restart.cut(bytes(damaged), header, box) is None


def test_wrong_lengths_are_found_by_their_markers():
    """A program may change a JPEG and keep the application segments of the old one."""
    random = np.random.default_rng(11)
    content = restart.encode(make_image(200, 90), "4:2:0", quality=80)
    header = restart.read_header(content)
    segments = 13 * 6
    assert restart._read_ends(content, header, segments) is not None
    for place in (header.lengths_end - 1, header.lengths_end - 40, 20):
        changed = bytearray(content)
        changed[place] ^= 1
        assert restart._read_ends(bytes(changed), header, segments) is None
        compare(bytes(changed), random)
    without = content[:2] + content[header.lengths_end :]
    assert restart.read_header(without).lengths_end == 0
    compare(without, random)


def test_damaged_bytes_never_end_in_another_error():
    """Whatever is damaged, the part is refused, or it is a JPEG that decodes or fails as one."""
    random = np.random.default_rng(5)
    content = restart.encode(make_image(96, 64), "4:2:0", quality=70)
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(int(random.integers(1, 4))):
            damaged[int(random.integers(2, 700 if random.random() < 0.6 else len(content)))] = int(
                random.integers(256)
            )
        header = restart.read_header(bytes(damaged))
        part = header and restart.cut(bytes(damaged), header, (8, 8, 16, 16))
        if part:
            with contextlib.suppress(ValueError):
                simplejpeg.decode_jpeg(part.content)


def test_a_file_is_encoded_again_with_its_own_tables_and_subsampling():
    for number, (sampling, mode) in enumerate(
        [("4:4:4", "RGB"), ("4:2:2", "RGB"), ("4:2:0", "RGB"), ("4:2:0", "L")]
    ):
        image = Image.fromarray(load_sample_images().images[number % 2]).convert(mode)
        file = save(image, quality=91, subsampling=sampling, progressive=number == 1, comment=b"a comment")
        made = restart.encode_again(file)
        old, new = Image.open(io.BytesIO(file)), Image.open(io.BytesIO(made))
        assert old.quantization == new.quantization and old.mode == new.mode
        assert mode == "L" or old.layer == new.layer, "the factors of the subsampling"
        assert b"a comment" not in made and restart.read_header(made)
        pixels = [simplejpeg.decode_jpeg(each).astype(np.int64) for each in (file, made)]
        assert np.abs(pixels[0] - pixels[1]).mean() < 1.5
        assert restart.encode_again(made) == made, "it has markers: its bytes are kept"


def test_a_file_that_cannot_be_encoded_again_is_kept():
    for content in (b"\xff\xd8\xff\xe0", save(make_image(40, 30).convert("CMYK"))):
        assert restart.encode_again(content) == content
    with pytest.raises(ValueError, match="65501x1 pixels, a side may have 65500"):
        restart.encode(Image.new("RGB", (65501, 1)), "4:2:0", quality=90)


# In packs


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    kinds = {
        "plain.jpg": ("RGB", (640, 427), {"quality": 92}),
        "444.jpg": ("RGB", (301, 299), {"quality": 97, "subsampling": "4:4:4"}),
        "422.jpg": ("RGB", (320, 500), {"quality": 85, "subsampling": "4:2:2"}),
        "progressive.jpg": ("RGB", (500, 375), {"quality": 90, "progressive": True}),
        "grey.jpg": ("L", (500, 333), {"quality": 90}),
        "cmyk.jpg": ("CMYK", (480, 300), {"quality": 90}),
        "lossless.png": ("RGB", (333, 257), {}),
        "small.jpg": ("RGB", (61, 97), {"quality": 90}),
        "markers.jpg": ("RGB", (512, 384), {"quality": 90, "restart_marker_blocks": 4}),
    }
    for number in range(2):
        folder = root / "train" / f"class_{number}"
        folder.mkdir(parents=True)
        for name, (mode, size, options) in kinds.items():
            make_image(*size, mode, number).save(folder / name, **options)
    return image_folder.load(str(root), "train", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module", params=forms.CUT)
def store(request, index, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("packs"))
    return pack.build(index, pack.place(root, index, request.param), request.param)


def test_boxes_of_a_pack_have_the_pixels_of_its_images(index, store):
    random = np.random.default_rng(3)
    scratch = np.empty(3 * 640 * 500, np.uint8)
    for id in range(len(index)):
        [content] = store.read(np.array([id]))
        assert restart.read_header(content), index.path(id)
        planned = int(index.heights[id])
        for box in draw_boxes(random, int(index.widths[id]), planned, 12):
            whole = pack.Store.decode_box(store, id, content, planned, box)
            assert np.array_equal(store.decode_box(id, content, planned, box), whole)
            assert np.array_equal(store.decode_box(id, content, planned, box, scratch), whole)
    if store.form == "jpeg_full":
        sizes = {store.image(id).shape[:2] for id in range(len(index))}
        assert (500, 320) in sizes and (427, 640) in sizes and (97, 61) in sizes
        named = {index.path(id).rpartition("/")[2]: id for id in range(len(index))}
        file = pack.FileStore(index).content(named["markers.jpg"])
        assert store.read(np.array([named["markers.jpg"]])) == [file], "its own bytes"
    else:
        assert max(min(store.image(id).shape[:2]) for id in range(len(index))) == 256


def test_the_loader_decodes_parts_and_delivers_the_pixels_of_whole_images(index, store, monkeypatch):
    plan = Plan(index, BatchSampler(len(index), 6, 7), random_resized_crop, 96)
    decoded = []
    decode = simplejpeg.decode_jpeg

    def count(content, *arguments, **options):
        pixels = decode(content, *arguments, **options)
        decoded.append(pixels.shape[0] * pixels.shape[1])
        return pixels

    batches = []
    for cuts in (True, False):
        decoded.clear()
        with monkeypatch.context() as patch:
            patch.setattr(pack.images.simplejpeg, "decode_jpeg", count)
            if not cuts:
                patch.setattr(restart, "read_header", lambda content: None)
            with backends.build("threads", store, plan, torch.device("cpu"), 2) as loader:
                batches.append([images.clone() for images, _ in loader])
        batches.append(sum(decoded))
    parts, pixels_of_parts, wholes, pixels_of_wholes = batches
    assert all(map(torch.equal, parts, wholes)) and len(parts) == 3
    assert pixels_of_parts < 0.85 * pixels_of_wholes


def test_a_sample_with_other_markers_is_decoded_as_a_whole(index, store):
    """Its checksum is right: an encoder may have written it. A cut one is an error with its name."""
    [content] = store.read(np.array([0]))
    without = save(Image.open(io.BytesIO(content)), quality=95)
    rows = Image.open(io.BytesIO(content)).height
    expected = simplejpeg.decode_jpeg(without)[4:24, 6:36]
    assert np.array_equal(store.decode_box(0, without, rows, (4, 6, 20, 30)), expected)
    with pytest.raises(BadInput, match=r"cannot decode .*/class_0/"):
        store.decode_box(0, content[: len(content) // 2], rows, (4, 6, 20, 30))
