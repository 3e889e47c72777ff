"""Ids, crops, effects, seeds and receipts keep their values: older runs are resumed with them."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from bootfile.receipt import receipt
from bootfile.sampling import generators
from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler, WholeBatchSampler, permute
from datasets.sampling import augment
from datasets.sampling.effects import Effects, draw_effects

IDS = np.array([0, 1, 7, 99, 100, 299, 2**31, 2**33 + 5])
SIZES = np.arange(300) % 37 * 16 + 40
FOLDER = SimpleNamespace(widths=SIZES, heights=SIZES[::-1])
MEMORY = SimpleNamespace(padding=4, flip=True)


class Pairs(SimpleNamespace):
    def __len__(self):
        return 150


def digest(*columns) -> str:
    content = b"".join(np.ascontiguousarray(column).astype(np.int64).tobytes() for column in columns)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def batches(sampler, *steps) -> str:
    found = []
    for step in steps:
        sampler.seek(step)
        found += [*sampler, *([sampler.batch(step)] if hasattr(sampler, "batch") else [])]
    return digest(*found)


def shuffled(kind, **options) -> str:
    place = {"rank": 1, "world_size": 2}
    return batches(kind(103, 10, 2**63 + 5, epochs=3, **place, **options), 0, 14, 25)


SUMS = receipt.batch_sums(IDS, IDS % 10, [IDS % 3, np.float32(IDS) / 7, IDS % 2 == 1], np.array([3, 3, 8]))
VALUES = {
    "permute": lambda: digest(*(permute(np.arange(1000), 1000, seed, 7) for seed in (0, 2**64 - 1))),
    "permute 2^62": lambda: digest(permute(IDS, 2**62, 3, 2**32 - 1)),
    "BatchSampler": lambda: shuffled(BatchSampler),
    "WholeBatchSampler": lambda: shuffled(WholeBatchSampler),
    "in order": lambda: shuffled(WholeBatchSampler, shuffle=False),
    "SequentialBatchSampler": lambda: digest(*SequentialBatchSampler(103, 10, rank=1, world_size=3)),
    "crop_flip": lambda: digest(*augment.crop_flip(MEMORY, IDS, 5, 2)),
    "alternating_flip": lambda: digest(*augment.alternating_flip(MEMORY, IDS, 5, 3)),
    "random_resized_crop": lambda: digest(*augment.random_resized_crop(FOLDER, np.arange(300), 5, 2)),
    "center_crop": lambda: digest(*augment.center_crop(FOLDER, np.arange(300), 5, 2)),
    "square_crop": lambda: digest(*augment.square_crop(Pairs(**vars(FOLDER)), np.arange(300), 5, 2, 32)),
    "center_square": lambda: digest(*augment.center_square(FOLDER, np.arange(300), 5, 2, 32)),
    "effects": lambda: digest(*draw_effects(Effects(True, 0.4, 0.5, 0.2, 1.0), IDS, 5, 2, 224)),
    "mixup": lambda: digest(*draw_effects(Effects(mixup=0.2), IDS, 5, 2, 224)),
    "seeds": lambda: digest([generators.derive_seed(5, rank, 9, 1) % 2**63 for rank in range(8)]),
    "receipt": lambda: digest(SUMS),
}
EXPECTED = {
    "permute": "5d7b78d51a3e2f3c",
    "permute 2^62": "7353d589860a4bbf",
    "BatchSampler": "adea9fc471208f30",
    "WholeBatchSampler": "ae0e960dffe4040b",
    "in order": "cb1154754d4ec0ca",
    "SequentialBatchSampler": "974b01f7f95323b6",
    "crop_flip": "59e7c7324b4ca81a",
    "alternating_flip": "996b9f941903e23f",
    "random_resized_crop": "89aac1c09f782750",
    "center_crop": "585c7b8f5ccb861c",
    "square_crop": "309d6d12036bffba",
    "center_square": "e9474e03a934ba10",
    "effects": "ed455f2f3766c719",
    "mixup": "0daed80cc2eec838",
    "seeds": "af8273751280a216",
    "receipt": "736da5c6fd05630c",
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_older_versions(name):
    assert VALUES[name]() == EXPECTED[name]
