"""torch.compile makes code for an H200 that can be captured as CUDA graphs and does not change layouts.

The code is generated and not run: tests/support/sm90.py describes how, and the limits of this test.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.conftest import environment, run

triton = pytest.importorskip("triton", reason="Triton is not installed")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

pytestmark = [
    pytest.mark.skipif(torch.__version__ < "2.14", reason="the stand-ins are for torch 2.14"),
    pytest.mark.skipif(not PTXAS.exists(), reason="this Triton has no ptxas"),
    pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="torchvision is not installed"),
]
NETWORKS = ["resnet18", "bottlenecks"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sm90")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    run("-m", "tests.support.sm90", folder, env=environment(**caches), timeout=600)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("network", NETWORKS)
def test_a_step_is_one_graph_that_changes_only_what_stays_in_place(network, found):
    """A step is one graph that writes only to memory with a fixed address, as CUDA graphs need."""
    assert (found[network]["graphs"], found[network]["breaks"]) == (1, 0)
    forward, backward = found[network]["passes"]
    assert forward["changed"] == {"resnet18": 60, "bottlenecks": 51}[network]  # BatchNorm: three buffers each
    assert not forward["moving"] and not backward["moving"]


@pytest.mark.parametrize("network", NETWORKS)
def test_the_whole_network_becomes_code_that_keeps_channels_last(network, found):
    forward, backward = found[network]["codes"]
    convolutions = {"resnet18": 20, "bottlenecks": 17}[network]
    assert forward["convolutions"] == backward["convolutions"] == convolutions
    assert forward["kernels"] > 30 and backward["kernels"] > 40
    assert not forward["of two axes"]
    # torch 2.14 computes the gradient of max pooling by scatter_add() in NCHW, up to the first convolution
    allowed = {"resnet18": 0, "bottlenecks": 3}[network]
    assert len(backward["of two axes"]) <= allowed
    assert all("max_pool2d" in each for each in backward["of two axes"][:1])


def test_a_kernel_compiles_for_sm_90(found):
    assert found["cubin"] > 1000  # bytes


def test_a_graph_break_is_found(found):
    assert (found["break"]["graphs"], found["break"]["breaks"]) == (2, 1)


def test_an_input_that_moves_and_is_changed_is_found(found):
    assert [len(each["moving"]) for each in found["mutates"]["passes"]] == [1, 0]


def test_a_conversion_of_the_layout_is_found(found):
    assert all(each["of two axes"] for each in found["layout"]["codes"])
