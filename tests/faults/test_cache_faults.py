"""With two hundred random faults of the cache servers, every engine delivers the same data."""

import random

import pytest
import torch

from datasets.loaders import backends
from datasets.stores import forms
from datasets.stores.shared import connection
from tests.datasets.stores.test_tiers import epoch_of, equal, index, plan_of, planned, uncached  # noqa: F401
from tests.support.redis_server import Opened, RedisServer, needed

pytestmark = [pytest.mark.faults, needed]
pytest.importorskip("redis", reason="redis-py is not installed")

CPU = torch.device("cpu")
FAULTS = 200
KINDS = ("kill", "restart", "stop", "flush", "flip", "cut", "lengthen", "exchange", "fill", "deny")


class Trouble:
    """A fault of a server that begins at a random step and ends some steps later."""

    def __init__(self, node, draw: random.Random, steps: int):
        self.node, self.kind = node, draw.choice(KINDS)
        self.begin = draw.randrange(steps)
        self.end = self.begin + draw.randrange(1, 4)
        self.draw, self.active = draw, False

    def __call__(self, step: int) -> None:
        if step == self.begin:
            self.active = True
            self._strike()
        if step == self.end:
            self.repair()

    def _strike(self) -> None:
        client = self.node.client(socket_timeout=5)
        if self.kind == "kill":
            self.node.kill()
        elif self.kind == "restart":
            self.node.kill()
            self.node.start()
        elif self.kind == "stop":
            self.node.pause()
        elif self.kind == "flush":
            client.flushall()
        elif self.kind == "fill":
            client.config_set("maxmemory", 1_500_000)
        elif self.kind == "deny":
            client.execute_command("ACL", "SETUSER", "default", "-mget")
        else:
            keys = [key for key in client.scan_iter() if key.rsplit(b":", 1)[1].isdigit()]
            for key in keys[::3]:
                value = client.get(key)
                place = self.draw.randrange(len(value)) if value else 0
                if not value:
                    continue
                if self.kind == "flip":
                    flipped = bytes([value[place] ^ 1 << self.draw.randrange(8)])
                    value = value[:place] + flipped + value[place + 1 :]
                elif self.kind == "cut":
                    value = value[:place]
                elif self.kind == "lengthen":
                    value += bytes(self.draw.randrange(1, 500_000))
                else:
                    value = client.get(self.draw.choice(keys)) or b""
                client.set(key, value)

    def repair(self) -> None:
        if not self.active:
            return
        self.active = False
        if self.kind == "kill":
            self.node.start()
        elif self.kind == "stop":
            self.node.resume()
        elif self.kind == "fill":
            self.node.client().config_set("maxmemory", 0)
        elif self.kind == "deny":
            self.node.client().execute_command("ACL", "SETUSER", "default", "+mget")


@pytest.mark.parametrize("seed", range(4))
def test_the_same_data_under_every_fault(seed, tmp_path, index, uncached, monkeypatch):  # noqa: F811
    """With a quarter of the faults, all engines deliver the same data in both forms."""
    monkeypatch.setattr(connection, "READ", 0.15)
    monkeypatch.setattr(
        connection, "_WORTH", 1
    )  # otherwise a server that is stopped repeatedly is no longer used
    draw = random.Random(seed)
    form = forms.SIZED[seed % 2]
    names = ["kspeed", "pytorch", *([] if backends.reasons(CPU)["dali"] else ["dali-kspeed"])]
    expected = {}
    for backend in names:
        with backends.build(backend, uncached[form], plan_of(index), CPU, 2) as loader:
            expected[backend] = epoch_of(loader)[0]
    said, counts = [], {"hits": 0, "bad": 0, "errors": 0}
    with RedisServer(tmp_path) as server:
        for number in range(FAULTS // 4):
            backend = names[number % len(names)]
            trouble = Trouble(server, draw, 5)
            with Opened(server.url(tail=f"?form={form}"), index, "active") as opened:
                opened.put_all()
                with backends.build(backend, opened.tiers, plan_of(index), CPU, 2) as loader:
                    for _ in range(2):
                        batches, sums = epoch_of(loader, 1, trouble)
                        assert equal(batches, expected[backend]), (number, backend, trouble.kind)
                        assert torch.equal(sums, planned(index))
                trouble.repair()
                for name in counts:
                    counts[name] += opened.store.counts[name]
                said += opened.said
    print(f"seed {seed}: {counts}, {len(said)} lines")
    assert counts["hits"] and counts["bad"] and counts["errors"]
