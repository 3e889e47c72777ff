"""Effects after the crop depend only on (seed, epoch, id), not on the batch or the rank."""

import argparse

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends, pixels
from datasets.sampling import augment
from datasets.sampling.effects import (
    CUTMIX,
    MIXUP,
    ONE,
    OPERATIONS,
    Effects,
    draw_effects,
    from_args,
    operation_at,
)
from datasets.stores.files import FileStore

pytestmark = pytest.mark.rounding

CPU, MEAN = torch.device("cpu"), (0.5, 0.4, 0.3)
ALL = Effects(trivial_augment=True, color_jitter=0.4, random_erasing=0.5, mixup=0.4, cutmix=1.0)
RAND = ALL._replace(trivial_augment=False, rand_augment="3,12")


def _images(count: int, size: int = 24) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, (count, 3, size, size), dtype=np.uint8))


def _applied(effects, ids, images, labels):
    return pixels.apply(effects, draw_effects(effects, ids, 7, 2, images.shape[2]), images, labels, 5, MEAN)


@pytest.mark.parametrize("effects", [ALL, RAND])
def test_pairs_are_changed_the_same_in_every_batch(effects):
    ids, images, labels = np.arange(100, 164), _images(64), torch.arange(64) % 5
    before = images.clone()
    whole, targets = _applied(effects, ids, images, labels)
    assert torch.equal(images, before), "the engine's memory is not written to"
    assert whole.shape == images.shape and not torch.equal(whole, images)
    torch.testing.assert_close(targets.sum(1), torch.ones(64))
    for first in range(0, 64, 2):
        rows = slice(first, first + 2)
        pair, labels_of_pair = _applied(effects, ids[rows], images[rows], labels[rows])
        assert torch.equal(pair, whole[rows]) and torch.equal(labels_of_pair, targets[rows])


def test_what_is_drawn_has_the_distributions_that_it_claims():
    ids = np.arange(20_000)
    drawn = draw_effects(ALL, ids, 7, 2, 64)
    assert not np.array_equal(drawn.strength, draw_effects(ALL, ids, 7, 3, 64).strength)
    assert np.bincount(drawn.operation) == pytest.approx(len(ids) / len(OPERATIONS), rel=0.1)
    assert drawn.brightness.min() >= 0.6 * ONE and drawn.brightness.max() <= 1.4 * ONE
    assert (drawn.erase_height > 0).mean() == pytest.approx(0.5, abs=0.02)
    erased = (drawn.erase_height * drawn.erase_width / 64**2)[drawn.erase_height > 0]
    assert erased.min() > 0.01 and erased.max() < 0.36 and erased.mean() == pytest.approx(0.175, abs=0.01)
    assert (drawn.mix == CUTMIX).mean() == pytest.approx(0.5, abs=0.02)
    mixed = drawn.share[drawn.mix == MIXUP] / ONE
    assert mixed.mean() == pytest.approx(0.5, abs=0.02) and mixed.var() == pytest.approx(0.25 / 1.8, abs=0.01)
    assert (drawn.erase_top + drawn.erase_height).max() <= 64
    assert (drawn.mix_left + drawn.mix_width).max() <= 64


def test_rand_augment_draws_its_operations_independently():
    ids = np.arange(20_000)
    drawn = draw_effects(Effects(rand_augment="3,12"), ids, 7, 2, 64)
    parts = [operation_at(drawn.operation, drawn.strength, place) for place in range(4)]
    for operation, strength in parts[:3]:
        assert np.bincount(operation) == pytest.approx(len(ids) / len(OPERATIONS), rel=0.1)
        assert set(strength) == {-12, 12} and (strength > 0).mean() == pytest.approx(0.5, abs=0.02)
    assert not parts[3][0].any()
    (one, sign), (other, _), _, _ = parts
    assert (one == other).mean() == pytest.approx(1 / len(OPERATIONS), abs=0.01)
    assert sign[one == 5].mean() == pytest.approx(0, abs=2)
    assert not np.array_equal(drawn.operation, draw_effects(Effects(rand_augment="3,12"), ids, 7, 3, 64)[0])
    for number in (0, 7777):
        numbers = int(drawn.operation[number]), int(drawn.strength[number])
        assert [operation_at(*numbers, place) for place in range(3)] == [
            (part[0][number], part[1][number]) for part in parts[:3]
        ]


def test_the_two_ways_to_draw_operations_exclude_each_other():
    args = argparse.Namespace(**RAND._replace(trivial_augment=True)._asdict())
    with pytest.raises(BadInput, match="--trivial_augment and --rand_augment"):
        from_args(args, 2)


def test_rand_augment_applies_its_operations_in_turn():
    images = _images(16)
    found, _ = _applied(Effects(rand_augment="2,20"), np.arange(16), images, torch.zeros(16).long())
    drawn = draw_effects(Effects(rand_augment="2,20"), np.arange(16), 7, 2, 24)
    for row in range(16):
        image = images[row : row + 1]
        for place in (0, 1):
            number, strength = operation_at(drawn.operation[row], drawn.strength[row], place)
            image = pixels._operate(OPERATIONS[number], image, np.array([strength]), pixels.narrow(24))
        assert torch.equal(found[row : row + 1], image)


def test_mixed_images_consist_of_both():
    images, labels = _images(32), torch.arange(32) % 5
    other = torch.arange(32) ^ 1
    effects = Effects(cutmix=1.0)
    found, targets = _applied(effects, np.arange(32), images, labels)
    is_own, is_other = (found == images).all(1), (found == images[other]).all(1)
    assert bool((is_own | is_other).all())
    share = is_own.float().mean((1, 2))
    torch.testing.assert_close(targets[torch.arange(32), labels], share, atol=2e-3, rtol=0)
    found, targets = _applied(Effects(mixup=0.4), np.arange(32), images, labels)
    share = targets[torch.arange(32), labels].view(-1, 1, 1, 1)
    torch.testing.assert_close(found.float(), images * share + images[other] * (1 - share), atol=0.51, rtol=0)


@pytest.mark.parametrize("space", [pixels.WIDE, pixels.narrow(32)], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "identity"])
def test_operations_are_those_of_torchvision(name, space):
    """The difference is at most one grey level, for nearly all pixels if the operation moves the image."""
    images = functional.gaussian_blur(_images(4, 32), 5)
    strength = 12
    published = v2.TrivialAugmentWide if space is pixels.WIDE else v2.RandAugment
    of = lambda key: float(published._AUGMENTATION_SPACE[key][0](31, 32, 32)[strength])  # noqa: E731
    magnitude, angle, shift = of("Brightness"), np.degrees(np.arctan(of("ShearX"))), round(-of("TranslateX"))
    reference = {
        "brightness": lambda: functional.adjust_brightness(images, 1 + magnitude),
        "saturation": lambda: functional.adjust_saturation(images, 1 + magnitude),
        "contrast": lambda: functional.adjust_contrast(images, 1 + magnitude),
        "sharpness": lambda: functional.adjust_sharpness(images, 1 + magnitude),
        "posterize": lambda: functional.posterize(images, int(of("Posterize"))),
        "solarize": lambda: functional.solarize(images, 255 * (1 - strength / 30)),
        "autocontrast": lambda: functional.autocontrast(images),
        "equalize": lambda: functional.equalize(images),
        "rotate": lambda: functional.rotate(images, of("Rotate")),
        "shear_x": lambda: functional.affine(images, 0, [0, 0], 1, [angle, 0], center=[0, 0]),
        "shear_y": lambda: functional.affine(images, 0, [0, 0], 1, [0, angle], center=[0, 0]),
        "translate_x": lambda: functional.affine(images, 0, [shift, 0], 1, [0, 0]),
        "translate_y": lambda: functional.affine(images, 0, [0, shift], 1, [0, 0]),
    }[name]()
    found = pixels._operate(name, images, np.full(4, strength), space)
    wrong = ((found.int() - reference.int()).abs() > 1).float().mean()
    moves = name.startswith(("rotate", "shear", "translate"))
    assert wrong <= (0.06 if moves else 0.0) and not torch.equal(found, images)


def test_a_loader_delivers_the_same_at_any_world_size_and_after_a_seek(tmp_path):
    root = random_folder.make(str(tmp_path / "images"))
    index = image_folder.load(root, "val", str(tmp_path / "cache"))

    def flip(images, labels):
        assert images.dtype == torch.uint8 and images.shape[1:] == (3, 32, 32)
        return images if torch.rand(()) < 0.5 else images.flip(3), labels

    def deliver(rank: int, world_size: int, step: int = 0, transform=None) -> tuple[list, str]:
        sampler = BatchSampler(len(index), 32, 5, epochs=1, rank=rank, world_size=world_size)
        plan = Plan(index, sampler, augment.random_resized_crop, 32)
        plan.seek(step)
        with backends.build("threads", FileStore(index), plan, CPU, 1) as loader:
            loader.effects, loader.transform = ALL, transform
            found = [(images.clone(), targets) for images, targets in loader]
            return found, torch.from_numpy(loader.receipt.take())

    whole, receipt = deliver(0, 1)
    halves = [deliver(rank, 2) for rank in range(2)]
    assert torch.equal(receipt, halves[0][1] + halves[1][1])
    for all_, first, second in zip(whole, halves[0][0], halves[1][0], strict=True):
        for together, *parts in zip(all_, first, second, strict=True):
            assert torch.equal(together, torch.cat(parts))
    later, _ = deliver(0, 1, step=3)
    for one, other in zip(whole[3:], later, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    state = torch.get_rng_state()
    first, again = deliver(0, 1, transform=flip)[0], deliver(0, 1, step=3, transform=flip)[0]
    assert torch.equal(torch.get_rng_state(), state), "the job's random numbers are not used"
    assert all(torch.equal(one[0], other[0]) for one, other in zip(first[3:], again, strict=True))
    assert any(not torch.equal(one[0], other[0]) for one, other in zip(first, whole, strict=True))
