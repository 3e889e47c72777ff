import argparse

import pytest

from common.exits import BadInput
from common.topology import Topology, resolve


def _resolve(env=None, processes_per_node=1, **args):
    given = dict.fromkeys(("init_method", "rank", "world_size")) | args
    return resolve(argparse.Namespace(processes_per_node=processes_per_node, **given), env or {})


LAUNCHED = dict(
    RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", MASTER_ADDR="h", MASTER_PORT="1234"
)


def test_nothing_injected_is_one_node():
    assert _resolve() == Topology(0, 1, 1, None, None, None, "node", "plain")
    assert _resolve(processes_per_node=4).world_size == 4


@pytest.mark.parametrize("init_method", ["tcp://job-0.job:6666", "job-0.job:6666"])
def test_modelarts_arguments_count_nodes(init_method):
    topology = _resolve(init_method=init_method, rank=1, world_size=2, processes_per_node=8)
    assert topology == Topology(1, 2, 8, None, "job-0.job", 6666, "node", "modelarts-arguments")
    assert (topology.world_size, topology.rank) == (16, 8)


def test_a_launcher_counts_processes_and_wins():
    topology = _resolve(LAUNCHED, init_method="tcp://other:1", rank=0, world_size=2, processes_per_node=3)
    assert topology == Topology(1, 2, 4, 1, "h", 1234, "process", "launcher")
    assert (topology.world_size, topology.rank) == (8, 5)
    assert _resolve(LAUNCHED | {"TORCHELASTIC_RUN_ID": "none"}).source == "torchrun"


@pytest.mark.parametrize(
    "env, message",
    [
        (LAUNCHED | {"RANK": "x"}, "RANK=x is not a whole number"),
        (LAUNCHED | {"LOCAL_RANK": "2"}, "RANK=5 LOCAL_RANK=2 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 contradict"),
        (LAUNCHED | {"WORLD_SIZE": "6"}, "contradict each other"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, but RANK is not"),
    ],
)
def test_a_broken_launcher_is_named(env, message):
    with pytest.raises(BadInput, match=message):
        _resolve(env)
