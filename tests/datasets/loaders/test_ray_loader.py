"""On a Ray cluster of two nodes, RayDataLoader and the engines give torch's batches, whatever fails."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, get_worker_info

from common.exits import BadInput
from datasets.compat.dpex import DpexDataLoader, RayDataLoader
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends
from datasets.loaders.engines.map_style import map_style_loader
from datasets.loaders.engines.threads import Threads
from datasets.loaders.loader import Loader
from datasets.loaders.ray.engine import FolderCutter, RayEngine, ray_map_style_loader
from datasets.loaders.ray.pool import Pool
from datasets.loaders.ray.wire import pack, unpack
from datasets.sampling.augment import random_resized_crop
from datasets.sampling.sampler import BatchSampler, Plan
from datasets.stores.files import FileStore
from tests.conftest import ROOT, environment
from tests.support.ray_data_sets import Broken, Count, Draws, Noisy, Squares
from tests.support.ray_nodes import RayNodes, wait_until

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.52"')


@pytest.fixture(scope="module")
def cluster():
    """Return two nodes."""
    nodes = RayNodes(2, 3)
    kept = {name: os.environ.get(name) for name in nodes.environment}
    os.environ.update(nodes.environment)
    yield nodes
    for name, value in kept.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    nodes.close()


def same(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right


def epoch(loader) -> list:
    return list(loader)


def plain(dataset, **options) -> list:
    torch.manual_seed(3)
    return epoch(DataLoader(dataset, num_workers=2, **options))


def remote(dataset, workers=2, **options) -> list:
    torch.manual_seed(3)
    with RayDataLoader(dataset, True, num_workers=workers, **options) as loader:
        return epoch(loader)


def test_the_name_and_the_arguments_of_the_seed(cluster):
    assert DpexDataLoader is RayDataLoader and issubclass(DpexDataLoader, DataLoader)
    data = Squares()
    expected = plain(data, batch_size=7)
    wait_until(lambda: not cluster.workers())  # of another test
    for off in ({"distribute_mode": False, "num_workers": 2}, {"distribute_mode": True, "num_workers": 0}):
        assert same(epoch(DpexDataLoader(data, batch_size=7, **off)), expected)
    assert not cluster.workers()


@pytest.mark.parametrize("options", [
    {"batch_size": 7, "shuffle": True, "drop_last": True}, {"batch_size": None},
    {"batch_sampler": [[3, 1], [2], [59, 0, 4]],
     "collate_fn": lambda samples: [sample["image"] for sample in samples]},
], ids=lambda options: " ".join(options))  # fmt: skip
def test_the_batches_of_torch_in_the_same_order(cluster, options):
    assert same(remote(Squares(), **options), plain(Squares(), **options))


@pytest.mark.parametrize("options", [{"batch_size": 4, "drop_last": True}, {"batch_size": None}])
def test_an_iterable_data_set(cluster, options):
    assert same(remote(Count(), **options), plain(Count(), **options))


def test_random_numbers_follow_from_the_seed_and_not_from_the_workers(cluster, tmp_path):
    few, many = remote(Draws(), 1, batch_size=4), remote(Draws(tmp_path), 3, batch_size=4)
    for left, right in zip(few, many, strict=True):
        assert all(torch.equal(left[k], right[k]) for k in (0, 4, 5, 6))
    assert {int(n) for batch in many for n in batch[2]} == {3}
    seeds = {(int(worker), int(seed)) for batch in many for worker, seed in zip(*batch[1:4:2], strict=True)}
    assert len({seed for _, seed in seeds}) == len({worker for worker, _ in seeds}) == len(seeds) > 1
    drawn = torch.cat([batch[4] for batch in many])
    assert len(drawn.unique()) == len(drawn)
    with RayDataLoader(Draws(), True, batch_size=4, num_workers=1) as loader:
        first, second = ([batch[4] for batch in loader] for _ in range(2))
    assert not torch.equal(torch.cat(first), torch.cat(second))


def test_worker_init_fn_and_a_data_set_that_changes_between_epochs(cluster):
    data = Squares(8)

    def begin(worker):
        get_worker_info().dataset.table = get_worker_info().dataset.table + 1000

    for persistent in (False, True):
        data.table = np.arange(8) ** 2
        with RayDataLoader(data, True, batch_size=8, num_workers=1, worker_init_fn=begin,
                           persistent_workers=persistent) as loader:  # fmt: skip
            (first,), data.table = epoch(loader), -data.table
            (second,) = epoch(loader)
        assert first["square"].tolist() == [1000 + id * id for id in range(8)]
        changed = [1000 + (1 if persistent else -1) * id * id for id in range(8)]
        assert second["square"].tolist() == changed


def test_batches_are_the_caller_s_own(cluster):
    with RayDataLoader(Squares(), True, batch_size=5, num_workers=2) as loader:
        kept = []
        for batch in loader:
            batch["image"] += 100
            batch["square"].mul_(2)
            kept.append(batch)
        for batch in loader:  # memory is not reused while it is held
            batch["image"].zero_()
    for batch in kept:
        assert torch.equal(batch["image"][:, 0, 0, 0], (batch["id"] + 100).to(torch.uint8))
        assert torch.equal(batch["square"], 2 * batch["id"] ** 2)


def test_memory_formats_and_empty_and_odd_tensors_travel():
    for value in (
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.empty(0, 3),
        torch.arange(20).view(4, 5)[:, ::2], torch.tensor(3.5), torch.tensor([True, False]),
        torch.randn(2, 2, requires_grad=True), torch.randn(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(), torch.zeros(1, 4).expand(3, 4),
    ):  # fmt: skip
        found = unpack(pack(value))
        assert found.dtype == value.dtype and torch.equal(found.to_dense(), value.detach().to_dense())
        assert found.shape == value.shape
        if value.ndim == 4:
            assert found.is_contiguous(memory_format=torch.channels_last)
    form, buffers = pack({"a": torch.zeros(1000, dtype=torch.uint8), "b": np.zeros(1000)})
    assert len(form) < 500 and [len(buffer) for buffer in buffers] == [1000, 8000]


def test_an_error_names_the_sample_and_shows_the_workers_traceback(cluster):
    with RayDataLoader(Broken(), True, batch_size=6, num_workers=2) as loader:
        batches = iter(loader)
        assert [next(batches)["id"].tolist() for _ in range(2)] == [[*range(6)], [*range(6, 12)]]
        with pytest.raises(KeyError) as raised:
            next(batches)
        text = str(raised.value)
        assert "sample 17: no such key" in text and 'raise KeyError("no such key")' in text
        assert next(batches)["id"].tolist() == [*range(18, 24)]


def test_no_more_batches_are_made_than_are_wanted(cluster, tmp_path):
    class Marks(Squares):
        def __getitem__(self, id):
            (tmp_path / str(id)).touch()
            return id

    with RayDataLoader(Marks(), True, batch_size=2, num_workers=2, prefetch_factor=3) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 14)
        time.sleep(1)
        assert len(list(tmp_path.iterdir())) == 14  # 1 + 2 workers x 3


def test_a_slow_batch_is_waited_for_unless_there_is_a_limit(cluster):
    data = Squares(8, slow=(3,), seconds=4.0)
    with RayDataLoader(data, True, batch_size=4, num_workers=1) as loader:
        assert same(epoch(loader), plain(Squares(8), batch_size=4))
        loader.timeout = 1.0
        with pytest.raises(RuntimeError, match=r"within 1 seconds"):
            epoch(loader)


def test_killed_workers_change_nothing(cluster):
    data, said = Squares(200, slow=None, seconds=0.01), []
    expected = plain(Squares(200), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    found = []
    with RayDataLoader(data, True, batch_size=4, shuffle=True, num_workers=3, log=said.append) as loader:
        for step, batch in enumerate(loader):
            found.append(batch)
            if step in (3, 20):
                cluster.workers()[0].kill()
    assert same(found, expected) and any("was lost" in line for line in said)


@pytest.mark.faults
def test_killed_workers_of_an_iterable_data_set(cluster):
    expected = plain(Count(200), batch_size=4)
    found = []
    with RayDataLoader(Count(200), True, batch_size=4, num_workers=2, log=str) as loader:
        for step, batch in enumerate(loader):
            found.append(batch)
            if step in (2, 9):
                cluster.workers()[0].kill()
    assert same(found, expected)


@pytest.mark.parametrize("data", [Squares(80, slow=None, seconds=0.01), Count(80)], ids=["map", "iterable"])
def test_without_the_link_to_ray_it_goes_on_here(cluster, data):
    said, found = [], []
    expected = plain(data, batch_size=4)
    torch.manual_seed(3)
    with RayDataLoader(data, True, batch_size=4, num_workers=2, log=said.append) as loader:
        for step, batch in enumerate(loader):
            found.append(batch)
            if step == 4:
                os.kill(loader._pool.process, signal.SIGKILL)
        assert same(epoch(loader), expected)
    assert same(found, expected)
    assert said == ["lost the connection to the Ray cluster: the data are prepared here from now on"]
    wait_until(lambda: not cluster.workers())


def test_a_batch_that_ends_every_worker_is_an_error(cluster):
    tests = os.getpid()

    class Deadly(Squares):
        def __getitem__(self, id):
            if id == 9:
                assert os.getpid() != tests, "Ray failed, and the batch is prepared in this process"
                os._exit(1)
            return id

    said = []
    with (
        RayDataLoader(Deadly(), True, batch_size=4, num_workers=1, log=said.append) as loader,
        pytest.raises(RuntimeError, match="it ended 3 workers in a row"),
    ):
        epoch(loader)


def test_a_cluster_without_room_is_named(cluster):
    with (
        RayDataLoader(Squares(), True, num_workers=2, cpus_per_worker=64) as loader,
        pytest.raises(BadInput, match=r"the Ray cluster is full: 2 workers of 64 CPU .* of its 5 CPUs"),
    ):
        epoch(loader)


def test_that_fewer_workers_run_is_said_once(cluster):
    said = []
    with RayDataLoader(Squares(), True, batch_size=4, num_workers=7, log=said.append) as loader:
        assert same(epoch(loader) + epoch(loader), 2 * plain(Squares(), batch_size=4))
    assert said == ["ray: 5 of 7 workers run: the cluster has 5 CPUs, and each takes 1"]


@pytest.mark.faults
def test_a_loader_waits_for_cpus_that_another_one_holds(cluster):
    said = []
    with (
        RayDataLoader(Squares(), True, batch_size=4, num_workers=5, log=str) as other,
        RayDataLoader(Squares(), True, batch_size=4, num_workers=5, log=said.append) as loader,
        ThreadPoolExecutor(1) as pool,
    ):
        epoch(other)
        waiting = pool.submit(epoch, loader)
        wait_until(lambda: said, 60)
        other.close()
        assert same(waiting.result(120), plain(Squares(), batch_size=4))
    assert said == ["ray: 0 of 5 workers run: 0 of the cluster's 5 CPUs are free"]


@pytest.mark.faults
def test_a_cluster_without_room_for_all_workers_of_an_iterable_data_set(cluster):
    with (
        RayDataLoader(Count(), True, batch_size=4, num_workers=7, log=str) as loader,
        pytest.raises(BadInput, match=r"the Ray cluster is full: 7 workers of 1 CPU"),
    ):
        epoch(loader)


def test_no_cluster_is_named():
    with (
        RayDataLoader(Squares(), True, "127.0.0.1:9", num_workers=1) as loader,
        pytest.raises(BadInput, match=r"no Ray cluster at 127.0.0.1:9: .*`ray start --head`.* head_address="),
    ):
        epoch(loader)
    for address in ("nowhere", "a:b", "http://a:1"):
        with pytest.raises(BadInput, match=f"head_address {address} is not auto or HOST:PORT"):
            RayDataLoader(Squares(), True, address, num_workers=1)


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
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert result.stdout.startswith("2\n") and result.stdout.count('pip install "ray') == 2, result


def test_two_loaders_abandoned_epochs_and_nothing_left(cluster):
    children = set(psutil.Process().children())
    one = RayDataLoader(Squares(), True, batch_size=4, num_workers=2)
    two = RayDataLoader(Count(), True, batch_size=4, num_workers=2)
    for _ in range(3):
        for left, _ in zip(one, two, strict=False):
            if left["id"][0] >= 12:
                break
    assert len(epoch(one)) == 15 and len(epoch(two)) == 8
    both = zip(one, one, strict=True)  # two iterators of one loader
    assert all(same(left, right) for left, right in both)
    two.close()
    del one, two, left, both
    gc.collect()
    wait_until(lambda: not cluster.workers())
    assert set(psutil.Process().children()) <= children


def test_a_killed_process_leaves_nothing(cluster, tmp_path):
    code = """import sys, time
from datasets.compat.dpex import RayDataLoader
loader = RayDataLoader(list(range(1000)), True, batch_size=4, num_workers=2)
batches = iter(loader)
next(batches); print("begun", flush=True); time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "begun\n" and cluster.workers()
        brokers = psutil.Process(process.pid).children()
        assert brokers
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    gone, alive = psutil.wait_procs(brokers, 30)
    assert gone and not alive
    wait_until(lambda: not cluster.workers())


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = random_folder.make(str(tmp_path_factory.mktemp("images") / "images"))
    misnamed = Path(folder) / "train" / "class_0" / "000.jpg"
    Image.open(misnamed).save(misnamed, "PNG")
    return image_folder.load(folder, "train", str(tmp_path_factory.mktemp("cache")))


def test_the_engine_delivers_what_threads_deliver(cluster, index):
    def plan():
        return Plan(index, BatchSampler(len(index), 100, 5), random_resized_crop, 48)

    found = []
    for engine in (Threads(FileStore(index), 2), RayEngine(FolderCutter(FileStore(index)), 3)):
        with Loader(engine, plan(), torch.device("cpu")) as loader:
            loader.seek(len(loader) + 1)
            found.append([(images.clone(), labels.clone()) for images, labels in loader])
            found.append(loader.receipt.take())
    assert torch.equal(found[1], found[3]) and len(found[0]) == len(found[2]) == 5
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(*found[::2], strict=True))


def test_an_engine_s_unreadable_image_is_named(cluster, index, tmp_path):
    store = FileStore(index)
    path = Path(index.path(3))
    content = path.read_bytes()
    path.write_bytes(content[:100])
    try:
        plan = Plan(index, BatchSampler(len(index), 64, 5), random_resized_crop, 48)
        with (
            Loader(RayEngine(FolderCutter(store), 2), plan, torch.device("cpu")) as loader,
            pytest.raises(BadInput, match=f"{path.name} has 100 bytes"),
        ):
            for _ in loader:
                pass
    finally:
        path.write_bytes(content)


def test_a_pool_s_workers_are_where_there_is_room(cluster):
    class Where:
        def begin(self, worker, workers):
            self.worker = worker

        def __call__(self, task):
            time.sleep(0.05)
            return ray.get_runtime_context().get_node_id(), self.worker

    pool = Pool(Where(), 4)
    nodes = {node for node, _ in pool.map(range(40), 40)}
    pool.close()
    assert len(nodes) == 2


def test_ray_is_a_backend_that_auto_does_not_take():
    assert "ray" in backends.BACKENDS and "ray" not in backends.reasons(torch.device("cpu"))
    assert backends.resolve("ray", torch.device("cpu")) == "ray"


def test_a_process_that_dies_while_the_head_is_mute_leaves_nothing():
    """A head that is being killed accepts connections and does not answer, and Ray waits for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        code = f"""from datasets.compat.dpex import RayDataLoader
next(iter(RayDataLoader([1, 2], True, "127.0.0.1:{head.getsockname()[1]}", num_workers=1)))"""
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment())
        try:
            head.settimeout(180)
            connection = head.accept()[0]  # our check of the head; Ray's connection follows
            time.sleep(1)
            (broker,) = psutil.Process(process.pid).children()
        finally:
            process.kill()
            process.wait()
        assert not psutil.wait_procs([broker], 15)[1]
        connection.close()


def test_any_dataset_draws_the_same_on_workers_of_ray(cluster):
    def batches(make):  # called as the jobs do
        sampler = BatchSampler(24, 6, seed=1, max_steps=5)
        with make(Noisy(), sampler, torch.device("cpu"), augment=True) as loader:
            found = [batch for _ in loader.epochs_from(0) for batch in loader]
            return found, loader.receipt.take(), loader.example(2)

    expected, sums, example = batches(map_style_loader)
    found, ray_sums, ray_example = batches(ray_map_style_loader)
    assert torch.equal(sums, ray_sums) and torch.equal(example, ray_example)
    assert len(found) == 5
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
