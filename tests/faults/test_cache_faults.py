"""With two hundred random faults of the cache servers, every engine delivers the same data."""

import random

import pytest
import torch

from datasets.loaders import backends
from datasets.stores import connection, forms
from tests.datasets.stores.conftest import index  # noqa: F401
from tests.datasets.stores.test_tiers import epoch_of, equal, plan_of, planned, uncached  # noqa: F401
from tests.support.redis_server import Opened, RedisServer, needed

pytestmark = [pytest.mark.thorough, needed]
pytest.importorskip("redis", reason="redis-py is not installed")

CPU = torch.device("cpu")
FAULTS = 200


def change(draw: random.Random, value: bytes, others: list[bytes]) -> bytes:
    """Return a damaged value: with a flipped bit, cut, longer, or that of another sample."""
    place = draw.randrange(len(value))
    flipped = value[:place] + bytes([value[place] ^ 1 << draw.randrange(8)]) + value[place + 1 :]
    return draw.choice(
        [flipped, value[:place], value + bytes(draw.randrange(1, 500_000)), draw.choice(others)]
    )


def damage(node, draw: random.Random) -> None:
    client = node.client(socket_timeout=60)
    keys = [key for key in client.scan_iter() if key.rsplit(b":", 1)[1].isdigit()]
    values = [value for value in client.mget(keys) if value]
    for key, value in zip(keys[::3], values, strict=False):
        client.set(key, change(draw, value, values))


def allow(node, right: str) -> None:
    node.client(socket_timeout=60).execute_command("ACL", "SETUSER", "default", right)


FAULTS_OF = {  # kind -> function(node, draw) at the begin, function(node) at the end
    "kill": (lambda node, _: node.kill(), lambda node: node.start()),
    "restart": (lambda node, _: (node.kill(), node.start()), None),
    "stop": (lambda node, _: node.pause(), lambda node: node.resume()),
    "flush": (lambda node, _: node.client().flushall(), None),
    "damage": (damage, None),
    "fill": (
        lambda node, _: node.client().config_set("maxmemory", 1_500_000),
        lambda node: node.client().config_set("maxmemory", 0),
    ),
    "deny": (lambda node, _: allow(node, "-mget"), lambda node: allow(node, "+mget")),
}


class Trouble:
    """A fault of a server that begins at a random step and ends some steps later."""

    def __init__(self, node, draw: random.Random, steps: int):
        self.node, self.draw, self.kind = node, draw, draw.choice([*FAULTS_OF, "damage", "damage"])
        self.begin = draw.randrange(steps)
        self.end, self.active = self.begin + draw.randrange(1, 4), False

    def __call__(self, step: int) -> None:
        if step == self.begin:
            self.active = True
            FAULTS_OF[self.kind][0](self.node, self.draw)
        if step == self.end:
            self.repair()

    def repair(self) -> None:
        repair = FAULTS_OF[self.kind][1]
        if self.active and repair:
            repair(self.node)
        self.active = False


@pytest.mark.parametrize("seed", range(4))
def test_the_same_data_under_every_fault(seed, tmp_path, index, uncached, monkeypatch):  # noqa: F811
    """With a quarter of the faults, all engines deliver the same data in both forms."""
    monkeypatch.setattr(connection, "READ", 0.15)
    monkeypatch.setattr(connection, "_PAUSE", 0.3)
    draw = random.Random(seed)
    form = forms.SIZED[seed % 2]
    names = ["kspeed", "pytorch", *([] if backends.reasons(CPU)["dali"] else ["dali-kspeed"])]
    expected = {}
    for backend in names:
        with backends.build(backend, uncached[form], plan_of(index), CPU, 2) as loader:
            expected[backend] = epoch_of(loader)[0]
    said = []
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
                said += opened.said
    assert said, "some faults were noticed"
