"""`python -m launch bench ray` measures rates with and without Ray, and predicts the rate of the cluster."""

import json

import pytest

from launch.bench.ray import _predict
from tests.conftest import run

FOUND = {
    "rates": {"threads": [1000.0, 900.0, 1100.0]}, "compute_images_per_s": 5000.0, "cpus": 64.0,
    "arch": "resnet18", "images_per_s_of_one_worker": 300.0, "images_per_s_of_the_way": 4000.0,
}  # fmt: skip


@pytest.mark.parametrize("other, said", [
    ({}, "4000 images/s, limited by the transport"),
    ({}, "remote workers help: up to 4.0x"),
    ({"cpus": 4.0}, "remote workers help: up to 1.2x"),
    ({"cpus": 4.0}, "1200 images/s, limited by their CPUs"),
    ({"cpus": 2.0}, "do not help: they would deliver no more"),
    ({"compute_images_per_s": 800.0}, "do not help: this machine delivers more"),
])  # fmt: skip
def test_the_prediction(other, said):
    assert said in _predict(FOUND | other)


def test_bad_input(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    command = ("-m", "launch", "bench", "ray", f"--cache_dir={tmp_path}")
    assert (
        "--ray_address x is not auto, start or HOST:PORT" in run(*command, "--ray_address=x", code=2).stderr
    )


@pytest.mark.faults
def test_a_cluster_of_its_own(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    result = run(
        "-m", "launch", "bench", "ray", "--ray_address=start", f"--cache_dir={tmp_path}", "--rounds=1",
        "--json", "--seconds=0.2", "--image_size=32",
        "--batch_size=16", "--workers=1", "--arch=resnet18", timeout=200,
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert found["nodes"] == 1 and found["transport_ms"] > 0 and found["remote_cpus"] == 0
    assert {"torch", "ray", "ray, same transforms", "threads"} <= found["rates"].keys()
    assert all(median > 0 for median, _, _ in found["rates"].values())
