"""With an instance of Ray on this machine, RayDataLoader and the engines give torch's batches."""

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, get_worker_info

from bootfile.ground.errors import BadInput
from bootfile.sampling import generators
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.compat.dpex import DpexDataLoader, RayDataLoader
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends
from datasets.loaders.engines.memory import make_loader
from datasets.loaders.ray import engine, pool
from datasets.loaders.ray.engine import RayWorkers
from datasets.sampling.augment import random_resized_crop
from datasets.sampling.effects import Effects
from datasets.stores.files import FileStore
from tests.conftest import run, wait_until
from tests.support.ray_data_sets import Draws, Noisy, Squares
from tests.support.ray_nodes import processes

if not importlib.util.find_spec("ray"):  # its import would read the environment
    pytest.skip('Ray is not installed: pip install "ray>=2.52"', allow_module_level=True)


@pytest.fixture(scope="module")
def folder():
    """Yield RAY_TMPDIR of the instance that the first loader of this process starts."""
    before, path = dict(os.environ), tempfile.mkdtemp(prefix="rl-")
    os.environ["RAY_TMPDIR"] = path
    yield path
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    os.environ.clear()
    os.environ.update(before)
    wait_until(lambda: not processes(path))
    shutil.rmtree(path)


def same(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right


def plain(dataset, **options) -> list:
    torch.manual_seed(3)
    return list(DataLoader(dataset, num_workers=2, **options))


def test_the_name_and_the_arguments_of_the_seed():
    """Without distribute_mode or workers, and for an IterableDataset, it is torch's loader."""
    assert DpexDataLoader is RayDataLoader and issubclass(DpexDataLoader, DataLoader)
    expected = plain(Squares(), batch_size=7)
    for off in ({"distribute_mode": False, "num_workers": 2}, {"distribute_mode": True, "num_workers": 0}):
        assert same(list(DpexDataLoader(Squares(), batch_size=7, **off)), expected)

    class Count(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from range(5)

    assert not DpexDataLoader(Count(), True, num_workers=2).distribute_mode


class _Pool:
    """The pool of a loader, without Ray: each task runs twice when its result is taken."""

    def __init__(self, workers, address, cpus):
        self.workers, self.made = workers, (workers, address, cpus)
        self.submitted, self.timeouts, self.is_closed = 0, [], False

    def put(self, function):
        return [function]

    def submit(self, held, task):
        self.submitted += 1
        return held, task

    def take(self, reference, timeout):
        self.timeouts.append(timeout)
        [function], task = reference
        first = function(task)
        again = function(task)  # on another actor, because the first one was lost
        assert same(first, again)
        return first

    def close(self):
        self.is_closed = True


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(engine, "Pool", _Pool)
    with generators.restored():
        yield
    torch.utils.data._utils.worker._worker_info = None


@pytest.mark.parametrize("options", [
    {"batch_size": 7, "shuffle": True}, {"batch_size": 8, "drop_last": True}, {"batch_size": None},
])  # fmt: skip
def test_the_order_of_the_batches_is_that_of_torch(here, options):
    expected = plain(Squares(20), **options)
    torch.manual_seed(3)
    with RayDataLoader(Squares(20), True, num_workers=2, **options) as loader:
        assert same(list(loader), expected) and len(iter(loader)) == len(expected)


def test_a_batch_follows_from_the_seed_and_its_number(here):
    inits = []
    options = {"batch_size": 2, "worker_init_fn": inits.append, "collate_fn": list, "timeout": 5}

    def epochs(seed, **more):
        torch.manual_seed(seed)
        loader = RayDataLoader(
            Draws(), True, "host:1", num_workers=3, cpus_per_worker=0.5, prefetch_factor=3, **options, **more
        )
        batches = iter(loader)
        assert loader._pool.submitted == 9, "three for each worker"
        first, second = list(batches), list(loader)
        assert loader._pool.made == (3, "host:1", 0.5) and {*loader._pool.timeouts} == {5}
        return first, second

    first, second = epochs(0)
    assert epochs(0) == (first, second)
    rows = [row for batch in (*first, *second, *epochs(1)[0]) for row in batch]
    assert len({row[4:] for row in rows}) == len(rows) == 72, "no sample has the numbers of another one"
    # get_worker_info() is that of torch's loader: batch n is of worker n % 3
    assert [batch[0][1] for batch in first] == [0, 1, 2] * 4
    assert all(row[2] == 3 and row[3] - row[1] == first[0][0][3] for batch in first for row in batch)
    assert inits == [0] * 6, "once for each epoch, which sends the data set again"
    first, second = epochs(2, persistent_workers=True)
    assert first != second and inits == [0] * 7


@pytest.mark.thorough
@pytest.mark.parametrize("options", [
    {"batch_size": None},
    {"batch_sampler": [[3, 1], [2], [59, 0, 4]],
     "collate_fn": lambda samples: [sample["image"] for sample in samples]},
], ids=["batch_size None", "batch_sampler collate_fn"])  # fmt: skip
def test_the_batches_of_torch_in_the_same_order(folder, options):
    torch.manual_seed(3)
    with RayDataLoader(Squares(), True, num_workers=1, **options) as loader:
        assert same(list(loader), plain(Squares(), **options))


@pytest.mark.thorough
def test_random_numbers_follow_from_the_seed_and_not_from_the_workers(folder):
    """They differ in every epoch, with and without persistent_workers."""
    epochs = []
    for workers, persistent in ((1, False), (2, True)):
        torch.manual_seed(3)
        options = {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent}
        with RayDataLoader(Draws(), True, **options) as loader:
            first, second = list(loader), list(loader)
        drawn = torch.cat([batch[4] for batch in first + second])
        assert len(drawn.unique()) == len(drawn) == 48
        epochs.append(first)
    for left, right in zip(*epochs, strict=True):
        assert all(torch.equal(left[k], right[k]) for k in (0, 4, 5, 6))
    many = epochs[1]
    assert {int(n) for batch in many for n in batch[2]} == {2}
    seeds = {(int(worker), int(seed)) for batch in many for worker, seed in zip(*batch[1:4:2], strict=True)}
    assert len({seed for _, seed in seeds}) == len({worker for worker, _ in seeds}) == 2


@pytest.mark.thorough
def test_worker_init_fn_and_a_data_set_that_changes_between_epochs(folder):
    data = Squares(8)

    def begin(worker):
        get_worker_info().dataset.table = get_worker_info().dataset.table + 1000

    for persistent in (False, True):
        data.table = np.arange(8) ** 2
        with RayDataLoader(data, True, batch_size=8, num_workers=1, worker_init_fn=begin,
                           persistent_workers=persistent) as loader:  # fmt: skip
            (first,), data.table = list(loader), -data.table
            (second,) = list(loader)
        assert first["square"].tolist() == [1000 + id * id for id in range(8)]
        changed = [1000 + (1 if persistent else -1) * id * id for id in range(8)]
        assert second["square"].tolist() == changed


@pytest.mark.thorough
def test_workers_have_the_priority_of_the_training(folder):
    """Ray gives them the least one by default: on a busy machine the training would wait for minutes."""
    actors = pool.Pool(1)
    call = actors.submit(actors.put(lambda task: os.nice(0)), (0, None))
    assert actors.take(call) == os.nice(0)
    actors.close()


@pytest.mark.thorough
def test_batches_are_the_caller_s_own(folder):
    def collate(items):
        return torch.tensor(items), np.zeros(3)

    with RayDataLoader(range(20), True, batch_size=5, num_workers=1, collate_fn=collate) as loader:
        for number, (tensor, array) in enumerate(loader):
            tensor += 100
            array += 1
            assert tensor.tolist() == [*range(100 + 5 * number, 105 + 5 * number)] and array.all()
        assert all(not array.any() for _, array in loader)


@pytest.mark.thorough
def test_batches_are_made_as_they_are_wanted_until_an_error_of_the_data_set(folder, tmp_path):
    """The error has the data set's type and the worker's traceback."""

    class Broken(Squares):
        def __getitem__(self, id):
            (tmp_path / str(id)).touch()
            if id == 57:
                raise KeyError("no such key")
            return id

    with RayDataLoader(Broken(), True, batch_size=2, num_workers=2, prefetch_factor=3) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 14)  # 1 + 2 workers x 3
        assert [next(batches).tolist() for _ in range(27)] == [[id, id + 1] for id in range(2, 56, 2)]
        with pytest.raises(KeyError, match=r'raise KeyError\("no such key"\)'):
            next(batches)
        assert len(batches) == len(loader)
        assert next(batches).tolist() == [58, 59]  # as with torch


@pytest.mark.thorough
def test_a_slow_batch_is_waited_for_unless_there_is_a_limit(folder):
    with RayDataLoader(Squares(1, seconds=2.5), True, num_workers=1) as loader:  # its pool looks every 2 s
        assert same(list(loader), plain(Squares(1)))
        loader.timeout = 1.0
        with pytest.raises(RuntimeError, match=r"timed out after 1 seconds"):
            list(loader)


@pytest.mark.thorough
def test_killed_workers_change_nothing(folder):
    options = {"batch_size": 7, "shuffle": True, "drop_last": True}
    expected, batches = plain(Squares(180), **options), []
    torch.manual_seed(3)
    with RayDataLoader(Squares(180, seconds=0.01), True, num_workers=2, **options) as loader:
        for step, batch in enumerate(loader):
            batches.append(batch)
            if step in (3, 12):
                processes(folder, "ray::Worker")[0].kill()
    assert same(batches, expected)


@pytest.mark.thorough
def test_a_batch_that_ends_every_worker_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(pool, "_RETRIES", 1)  # starting a worker takes seconds

    class Deadly(Squares):
        def __getitem__(self, id):
            return os._exit(1) if id == 9 else id

    with (
        RayDataLoader(Deadly(), True, batch_size=4, num_workers=1) as loader,
        pytest.raises(RuntimeError, match="2 Ray workers"),
    ):
        list(loader)


@pytest.mark.thorough
def test_two_loaders_abandoned_epochs_and_no_worker_left(folder):
    one = RayDataLoader(Squares(), True, batch_size=4, num_workers=2)
    two = RayDataLoader(Draws(), True, batch_size=4, num_workers=1)
    for _ in range(2):
        for left, _ in zip(one, two, strict=False):
            if left["id"][0] >= 12:
                break
    both = zip(one, one, strict=True)  # two iterators of one loader
    assert all(same(left, right) for left, right in both)
    two.close()
    del one, two, left, both, _
    gc.collect()
    wait_until(lambda: not processes(folder, "ray::Worker"))


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    images = random_folder.make(str(tmp_path_factory.mktemp("images") / "images"))
    misnamed = Path(images) / "train" / "class_0" / "000.jpg"
    Image.open(misnamed).save(misnamed, "PNG")
    return image_folder.load(images, "train", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.thorough
def test_the_engine_delivers_what_threads_deliver_and_names_an_unreadable_image(folder, index):
    def plan():
        return Plan(index, BatchSampler(len(index), 100, 5), random_resized_crop, 48)

    made, path = [], Path(index.path(int(next(iter(plan())).ids[0])))
    for backend in ("threads", "ray"):
        with backends.build(backend, FileStore(index), plan(), torch.device("cpu"), 2) as loader:
            loader.effects = Effects(rand_augment="2,9")
            loader.seek(len(loader) + 1)
            made.append([(images.clone(), labels.clone()) for images, labels in loader])
            made.append(torch.from_numpy(loader.receipt.take()))
            content = path.read_bytes()
            path.write_bytes(content[:100])
            loader.seek(0)
            with pytest.raises(BadInput, match=f"{path.name} has 100 bytes"):
                list(loader)
            path.write_bytes(content)
    assert torch.equal(made[1], made[3]) and len(made[0]) == len(made[2]) == 5
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(*made[::2], strict=True))


@pytest.mark.thorough
def test_any_dataset_draws_the_same_on_workers_of_ray(folder):
    def batches(workers):  # called as the jobs do
        sampler = BatchSampler(24, 6, seed=1, max_steps=5)
        with make_loader(Noisy(), sampler, torch.device("cpu"), augment=True, workers=workers) as loader:
            made = [batch for _ in loader.epochs_from(0) for batch in loader]
            return made, torch.from_numpy(loader.receipt.take()), loader.example(2)

    expected, sums, example = batches(None)
    made, ray_sums, ray_example = batches(RayWorkers(2))
    assert torch.equal(sums, ray_sums) and torch.equal(example, ray_example)
    assert len(made) == 5
    for one, other in zip(expected, made, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.thorough
def test_without_ray_the_command_is_named():
    code = """import sys; sys.modules["ray"] = None
import torch
from datasets.loaders import backends
from datasets.compat.dpex import RayDataLoader
print(len(list(RayDataLoader([1, 2], num_workers=1))))
for attempt in (lambda: list(RayDataLoader([1, 2], True, num_workers=1)),
                lambda: backends.resolve("ray", torch.device("cpu"))):
    try:
        attempt()
    except ValueError as error:
        print(error)
"""
    result = run("-c", code)
    assert result.stdout.startswith("2\n") and result.stdout.count('pip install "ray') == 2, result
