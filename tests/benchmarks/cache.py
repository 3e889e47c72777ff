"""Measure caches of samples: loaders with and without a cache, and with a dead server.

    python -m tests.benchmarks.cache [--images 512] [--rounds 5] [--workers 2]

The images are those of tests/benchmarks/loaders.py, 116 KB, in the page cache. A real redis-server runs on
the same cores, over TCP on the loopback. In a round all contestants run one after the other. Aims:
more than the first row of a table, and at least 0.99 of it with a dead server.

- loaders: epochs of batches of 64, decoded, cropped to 224 pixels and normalised, on the CPU.
- synthetic compute: after each batch the process sleeps for 20 ms instead of a device's work.
- dead server: `kspeed` with a server that refuses connections, or that was stopped (SIGSTOP) and times out.
"""

import contextlib
import tempfile
import time

import redis
import torch

from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.stores import connection, forms, pack
from datasets.stores.files import FileStore
from datasets.stores.redis_store import RedisStore
from datasets.stores.tiers import Tiers
from tests.benchmarks.loaders import SIZES, write_images
from tests.benchmarks.rounds import conditions, make_parser, print_ratios, take_turns
from tests.support.redis_server import RedisServer

CPU = torch.device("cpu")
BATCH, COMPUTE, KILOBYTES = 64, 0.02, 116  # images, seconds, size of an image


def main(arguments=None) -> None:
    parser = make_parser(__doc__, 5)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(arguments)
    said = []
    with contextlib.ExitStack() as stack, conditions():
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        print(write_images(f"{folder}/images", SIZES[KILOBYTES], KILOBYTES, args.images))
        index = image_folder.load(f"{folder}/images", "train", f"{folder}/cache")
        files = FileStore(index)
        packs = {form: pack.build(index, f"{folder}/{form}", form) for form in forms.SIZED}
        server = stack.enter_context(RedisServer(folder))
        stopped = stack.enter_context(RedisServer(folder))
        dead = RedisServer(folder)
        tiers = {}
        for name, where in (("redis", server), ("stopped", stopped), ("dead", dead)):
            for form in forms.SIZED:
                found = connection.Server(connection.parse(where.url(tail=f"?form={form}")), said.append)
                tiers[name, form] = Tiers(RedisStore(found, index, "offline"), files)
                stack.callback(found.close)
                stack.callback(tiers[name, form].close)
        for form in forms.SIZED:
            store = tiers["redis", form].cache
            store.reference.register(offline=True)
            store.put(range(len(index)), [packs[form].stored(id)[0] for id in range(len(index))])
        version = f"redis-py {redis.__version__}, redis-server {server.client().info()['redis_version']}"
        print(f"{len(index)} images, {args.rounds} rounds, {args.workers} workers, {version}")

        def loader_of(backend, store):
            plan = Plan(index, BatchSampler(len(index), BATCH, 0), random_resized_crop)
            loader = backends.build(backend, store, plan, CPU, args.workers)
            stack.callback(loader.close)
            return loader

        def epoch(backend, store, compute: float = 0.0):
            loader, number = loader_of(backend, store), 0

            def turn() -> float:
                nonlocal number
                number += 1
                loader.seek(number * len(loader))
                begin, count = time.perf_counter(), 0
                for images_, _ in loader:
                    count += len(images_)
                    time.sleep(compute)
                return count / (time.perf_counter() - begin)

            return turn

        here = {
            "pytorch, files": ("pytorch", files), "threads, files": ("threads", files),
            "kspeed, local, decoded": ("kspeed", packs["decoded"]),
            "kspeed, Redis, decoded": ("kspeed", tiers["redis", "decoded"]),
            "kspeed, Redis, encoded": ("kspeed", tiers["redis", "encoded"]),
        }  # fmt: skip
        if backends.reasons(CPU)["dali"] is None:
            here |= {
                "dali, files": ("dali", files),
                "dali-kspeed, local, decoded": ("dali-kspeed", packs["decoded"]),
                "dali-kspeed, Redis, decoded": ("dali-kspeed", tiers["redis", "decoded"]),
                "dali-kspeed, Redis, encoded": ("dali-kspeed", tiers["redis", "encoded"]),
            }
        found = take_turns({name: epoch(*each, COMPUTE) for name, each in here.items()}, args.rounds)
        for is_dali in (False, True):
            rows = {name: each for name, each in found.items() if name.startswith("dali") == is_dali}
            if rows:
                print_ratios("the job with synthetic compute", rows)
        stopped.pause()
        contestants = {"no cache, encoded": epoch("threads", files)}
        for name in ("dead", "stopped"):
            contestants[f"{name} server, encoded"] = epoch("kspeed", tiers[name, "encoded"])
        print_ratios("a dead server", take_turns(contestants, 2 * args.rounds))


if __name__ == "__main__":
    main()
