"""The type of mixed precision is one of the whole job."""

import pytest
import torch

from common.compute import precision
from tests.conftest import ROOT, run_ranks

pytestmark = pytest.mark.rounding

SCRIPT = """
import sys, torch
sys.path.insert(0, ROOT)
from bootfile.ground.errors import BadInput
from common.compute import precision

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
precision.choose(torch.device("cpu"), True)
precision.half_type = lambda device: (torch.bfloat16, torch.float16)[rank]  # GPUs of two kinds
precision.choose(torch.device("cpu"), False)
try:
    precision.choose(torch.device("cpu"), True)
except BadInput as error:
    print(error, flush=True)
"""


def test_ranks_with_other_types_are_refused(tmp_path):
    script = tmp_path / "other_types.py"  # types.py would be the module of Python
    script.write_text(f"ROOT = {str(ROOT)!r}\n{SCRIPT}")
    for result in run_ranks(script):
        assert "rank 0 has torch.bfloat16, rank 1 has torch.float16" in result.stdout


@pytest.mark.parametrize(
    "wanted, dtype, is_enabled, is_scaled",
    [
        (None, torch.bfloat16, False, False),  # on a CPU
        (False, torch.float16, False, False),
        (True, torch.bfloat16, True, False),
        (True, torch.float16, True, True),  # its range is small
    ],
)
def test_gradients_are_scaled_only_in_float16(monkeypatch, wanted, dtype, is_enabled, is_scaled):
    monkeypatch.setattr(precision, "half_type", lambda device: dtype)
    made = []
    monkeypatch.setattr(precision, "GradScaler", lambda enabled: made.append(enabled))
    autocast, _ = precision.choose(torch.device("cpu"), wanted)
    assert made == [is_scaled] and autocast._enabled == is_enabled and autocast.fast_dtype == dtype
