"""Read the samples of a step of a run again: ids, files, labels, crops and pixels. `launch data` calls it in
one process. The ranks of the run are computed, and nothing of the run is changed."""

import contextlib
import dataclasses
import glob
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, PngImagePlugin

from bootfile.console import outputs
from bootfile.ground.errors import BadInput
from bootfile.receipt.receipt import batch_sums
from bootfile.receipt.recorded_run import Run
from bootfile.sampling.plan import Plan
from bootfile.sampling.removal import Removal
from common.run import output
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends, image_folders, pixels, preprocessing
from datasets.loaders.engines.memory import Memory, plan_of
from datasets.memory import image_set
from datasets.sampling import augment
from datasets.sampling.effects import Effects
from datasets.stores.files import FileStore

MARK = re.compile("made by bootfile launch data")  # in the first bytes of a sheet
MARGIN = 4  # pixels around images
LINE = 12  # pixels of a line of text
LEAST = 64  # pixels of the side of an image; smaller ones are enlarged
_MOST = 10**8  # pixels of a sheet


class Step(NamedTuple):
    """The samples of a step, over all ranks in their order. columns: name -> value of each sample. pixels:
    uint8 [n, H, W, C], before normalisation; None if they were not asked for."""

    step: int
    title: str
    columns: dict[str, list]
    pixels: Any = None


@contextlib.contextmanager
def open_data(run: Run, data_url: str | None) -> Iterator[Any]:
    """Yield the training data of a run, an ImageSet or an ImageFolderIndex; None if it had a Dataset of its
    own, or no files. data_url: where they are now. Raises BadInput if they are not those of the run."""
    data: Any = None
    start = run.starts[-1]
    settings = start["settings"]
    fingerprint = str(start.get("training data")).partition("+")[0]
    # an index of its own for this command: neither the run nor the cache of the user is written to
    with tempfile.TemporaryDirectory(prefix="bootfile-data-") as cache:
        try:
            source = data_url or settings.get("data_url")
            is_generated = settings.get("custom_data")
            # as the job of the run made its data: a set in memory, or a folder of images
            if settings.get("dataset") in image_set.NAMES:
                data, _ = image_set.load(settings["dataset"], source, is_generated)
                data = dataclasses.replace(data, reflect=bool(settings.get("short_recipe")))
            elif "data_backend" in settings and start.get("data backend") != "synthetic":
                _copy_indexes(run, settings["cache_dir"], cache, fingerprint)
                if is_generated:
                    source = random_folder.make(f"{cache}/generated")
                data = image_folder.load(
                    source,
                    "train",
                    cache,
                    val_share=settings["val_share"],
                    splits=settings["splits"],
                    labelled=False,
                    max_bad=settings["max_bad_images"],
                    log=lambda line: None,  # the job has told what the scan finds
                )
        except (KeyError, TypeError) as error:
            raise BadInput(f"{run.path} does not describe the data of the run: {error!r}") from error
        if data is not None and data.fingerprint != fingerprint:
            raise BadInput(
                f"the training data of {run.folder} had the fingerprint {fingerprint}, now "
                f"{data.fingerprint}: they changed, or are at another --data_url; --ids needs no data"
            )
        yield data


def _copy_indexes(run: Run, cache_dir: str | None, cache: str, fingerprint: str) -> None:
    """Copy the indexes of the run's data to the folder `cache`: load() does not scan the data again, and
    writes to no cache of the run."""
    for folder in (cache_dir or cache, f"{run.folder}/index", f"{output.PARENT}/index"):
        for path in glob.glob(f"{glob.escape(folder)}/train-*"):
            with contextlib.suppress(BadInput):  # it is the index of other data
                index = image_folder.open_index(path, fingerprint).folder
                shutil.copytree(index, f"{cache}/{os.path.basename(path)}", dirs_exist_ok=True)


def read_step(run: Run, step: int, data: Any, draws: bool) -> Step:
    """Return a step, after its sums were compared with the receipt. data: that of open_data(). draws: whether
    the pixels are needed. Raises BadInput."""
    settings = run.start_of(step)["settings"]
    class_weights = None
    if data is not None and settings.get("class_weights"):
        class_weights = image_folders.read_class_weights(settings["class_weights"], data)
    sampler = run.sampler(step, class_weights)
    ids = run.ids(sampler, step)
    columns = {"rank": run.ranks(sampler, step).tolist(), "id": ids.tolist()}
    missing = len(sampler.batch(step - 1)) - len(ids)
    removed = f", {missing} removed" if missing else ""
    title = f"step {step}, epoch {sampler.epoch}, {len(ids)} samples{removed}: "
    if data is None:
        return Step(step, f"{title}ids equal to the receipt; no labels (--ids, or your own Dataset)", columns)
    prepared = preprocessing.values(settings)
    if isinstance(data, image_folder.ImageFolderIndex):
        plan, effects = _plan_folder(data, sampler, settings)
        cpu = torch.device("cpu")
        engine = backends.engine("threads", FileStore(data), cpu, interpolation=prepared.interpolation)
    else:
        engine = Memory(data, True)
        effects = Effects()
        plan = plan_of(data, sampler, True)
        if settings.get("short_recipe"):
            plan.augment = augment.alternating_flip
    plan.removal = Removal(run.removed)
    # the plan has the boxes and labels; no image is read for them
    batch: Any = next(iter(plan))
    for name, values in batch.crops._asdict().items():
        columns[name] = values.tolist()
    drawn = effects if any(effects) else None
    batch, change = pixels.plan_change(plan, batch, drawn, None, prepared.mean)
    # before a pixel is read: with other data the table would show samples that the run never had
    run.check(step, batch_sums(ids, batch.labels, batch.crops, np.array([len(ids)]))[0])
    classes = data.class_names or [*map(str, range(data.classes))]
    # the class of each sample, or its classes with commas between them
    sets = batch.labels if batch.labels.ndim > 1 else batch.labels[:, None] == np.arange(len(classes))
    names = np.array(classes, object)
    columns["label"] = [",".join(names[label]) for label in sets]
    if hasattr(data, "name"):
        columns["file"] = [data.name(id) for id in ids.tolist()]
    images = None
    with contextlib.closing(engine), contextlib.closing(engine.run(plan)) as batches:
        # an engine as in the job, on the CPU: the pixels before normalisation
        if draws:
            _, read = next(batches)
            changed, _ = change(read.permute(0, 3, 1, 2), torch.from_numpy(batch.labels))
            images = changed.permute(0, 2, 3, 1).numpy().copy()
    return Step(step, f"{title}equal to the receipt", columns, images)


def _plan_folder(data: Any, sampler: Any, settings: Mapping[str, Any]) -> tuple[Plan, Effects]:
    """Return the plan of a folder of images, and the effects, as a job with these options made them."""
    sides = {"first": settings["first_image_size"], "last": settings["image_size"]}
    side = image_folders.progressive_size(settings["epochs"], epoch=sampler.epoch, **sides)
    # a run of an earlier version has fewer of them
    chosen = {name: settings[name] for name in Effects._fields if settings.get(name)}
    return Plan(data, sampler, augment.random_resized_crop, side), Effects(**chosen)


def save_sheet(steps: list[Step], path: str) -> str:
    """Draw the images of steps as the model got them, with labels and ids: write a sheet as PNG, atomically,
    and return a line about it. Raises BadInput. The steps were compared with the receipt."""
    if any(step.pixels is None for step in steps):
        raise BadInput(f"--to {path}: a Dataset of your own has no images to draw here")
    height, width = [max(step.pixels.shape[axis] for step in steps) for axis in (1, 2)]
    cells = [(step, place) for step in steps for place in range(len(step.pixels))]
    total = len(cells)
    scale = math.ceil(LEAST / min(LEAST, max(height, width)))
    high = scale * height + 2 * LINE + MARGIN  # of a cell: the image and two lines of text
    wide = scale * width + MARGIN
    # larger sheets need gigabytes of memory: the rest is not drawn, as the line at the end says
    cells = cells[: _MOST // (high * wide)]
    columns = math.ceil(math.sqrt(len(cells)))
    sheet = Image.new("RGB", (columns * wide + MARGIN, -(-len(cells) // columns) * high + MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (step, place) in enumerate(cells):
        row, column = divmod(number, columns)
        x = MARGIN + column * wide
        y = MARGIN + row * high
        # whole pixels: an enlarged image shows each pixel that the model got
        image = step.pixels[place].repeat(scale, 0).repeat(scale, 1)
        sheet.paste(Image.fromarray(np.broadcast_to(image, (*image.shape[:2], 3)).copy()), (x, y))
        label = step.columns["label"][place].encode("latin-1", "replace").decode("latin-1")  # of the font
        text = f"{label[: wide // 6]}\n{step.step}: {step.columns['id'][place]}"
        pen.text((x, y + scale * height), text, "black", spacing=1)
    mark = PngImagePlugin.PngInfo()
    mark.add_text("Software", MARK.pattern)
    with outputs.open_result(path) as file:
        sheet.save(file, "PNG", pnginfo=mark)
    return f"{path}: {len(cells)} images of {total}"
