"""tests/benchmarks/scaling_model.py agrees with cases computed by hand."""

import pytest

from tests.benchmarks.scaling_model import (
    FORMATS,
    Network,
    Step,
    batchnorm_ms,
    hierarchical_ms,
    ring_ms,
    sample,
    waiting_ms,
)
from tests.conftest import run

SILENT = Network(intra_gbs=100, inter_gbs=10, latency=0)  # bandwidth alone
STEP = Step(ms=30, buckets_mb=(200, 100), backward=2 / 3, batchnorms=0)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_one_gpu_and_an_endless_network_wait_for_nothing(algorithm):
    slow = Network(1, 1, latency=10)
    assert waiting_ms(Step(30), 1, 1, slow, algorithm) == 0
    assert waiting_ms(Step(30), 16, 8, Network(float("inf"), float("inf"), 0), algorithm) == 0


def test_a_ring_moves_nearly_twice_the_bytes_over_its_slowest_link():
    assert ring_ms(100, 1, 8, SILENT) == pytest.approx(2 * 7 / 8 * 100 / 100)  # 1.75 ms
    assert ring_ms(100, 2, 8, SILENT) == pytest.approx(2 * 15 / 16 * 100 / 10)  # 18.75 ms
    assert ring_ms(0, 2, 8, SILENT._replace(latency=1)) == pytest.approx(0.0084 + 28 * 0.0034 + 2 * 0.0096)


def test_hierarchical_sums_leave_a_node_once():
    assert hierarchical_ms(100, 2, 8, SILENT) == pytest.approx(1.75 + 10)
    assert hierarchical_ms(100, 16, 8, SILENT) == pytest.approx(1.75 + 18.75)
    assert hierarchical_ms(100, 1, 8, SILENT) == ring_ms(100, 1, 8, SILENT)
    assert hierarchical_ms(0, 16, 8, SILENT._replace(latency=2)) == pytest.approx(
        2 * (0.0084 + 14 * 0.0034 + 30 * 0.0096)
    )


def test_the_backward_pass_hides_all_but_the_last_bucket():
    """200 and 100 MB take 37.5 and 18.75 ms; the backward pass is 20 ms, 40 or none."""
    assert waiting_ms(STEP, 2, 8, SILENT) == pytest.approx(18.75 + 37.5 - 20)
    assert waiting_ms(STEP._replace(ms=60), 2, 8, SILENT) == pytest.approx(18.75)
    assert waiting_ms(STEP._replace(backward=0), 2, 8, SILENT) == pytest.approx(18.75 + 37.5)
    assert waiting_ms(STEP._replace(backward=0), 2, 8, SILENT, share=FORMATS["bf16"]) == pytest.approx(28.125)


def test_batchnorm_waits_for_latencies():
    one = 3.6 + 7 * 0.47 + 4.4 + 2 * 7 * 0.52
    sixteen = 3.6 + 112 * 0.47 * 1.8 + 15 * 2.7 + 4.4 + 2 * (7 * 0.52 * 1.8 + 4 * 5)
    assert batchnorm_ms(1, 1, SILENT._replace(latency=1)) == 0
    assert batchnorm_ms(1, 8, SILENT._replace(latency=1)) == pytest.approx(one / 1000)
    assert batchnorm_ms(16, 8, SILENT._replace(latency=1)) == pytest.approx(sixteen / 1000)
    assert waiting_ms(Step(30, (0,), batchnorms=20), 1, 8, SILENT._replace(latency=1)) == pytest.approx(
        20 * one / 1000 + (8.4 + 14 * 3.4) / 1000
    )


def test_each_explanation_of_the_sample_gives_its_times_back():
    found = sample()
    assert found.speed_up == 3 and found.efficiency == 0.1875
    assert found.fixed_s + (36 - found.fixed_s) / 16 == pytest.approx(12)
    assert found.by_node_s / 2 + (36 - found.by_node_s) / 16 == pytest.approx(12)
    assert 24 * (36 / 391 + found.waiting_ms / 1000) == pytest.approx(12)
    assert 1.875 * 11_173_962 * 4 / (1e9 * found.ring_gbs) == pytest.approx(found.waiting_ms / 1000)
    assert 36 / (2 * found.per_gpu) == pytest.approx(12)
    assert found.validation_s == pytest.approx(36 / 16)  # 10,000 / 3 of 50,000 + 10,000 / 3


def test_it_prints_every_cluster():
    printed = run("-m", "tests.benchmarks.scaling_model", "--step_ms=10", "--batch_size=128").stdout
    assert "10 ms, 100 steps/s, 12,800 images/s" in printed and "3.0x, 19%" in printed
    rows = [line.split() for line in printed.splitlines() if line.endswith("%") and "bf16" in line]
    assert [row[0] for row in rows].count("16x8") == 6 and {row[0] for row in rows} == {"8", "2x8", "16x8"}
    for row in rows:
        rate, images = float(row[5]), float(row[6].replace(",", ""))
        gpus = {"8": 8, "2x8": 16, "16x8": 128}[row[0]]
        assert images == pytest.approx(rate * gpus * 128, rel=1e-3) and float(row[7][:-1]) == pytest.approx(
            rate, abs=0.06
        )
