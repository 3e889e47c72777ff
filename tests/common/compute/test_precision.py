"""The type of mixed precision is one of the whole job."""

import pytest

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
