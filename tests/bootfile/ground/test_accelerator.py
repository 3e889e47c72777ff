"""The accelerator of another vendor is found, and named in one line if it cannot be used."""

import json
import textwrap
import types

import pytest
import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from launch.profiles import make_rank_table
from tests.conftest import QUICK, ROOT, environment, finish, free_port, names, refused, run, start
from tests.support import python_device

# A stand-in for Huawei's package: it gives torch the device npu and the backend hccl when it is imported.
TORCH_NPU = textwrap.dedent(f"""
    import os, sys
    sys.path.insert(0, {str(ROOT)!r})
    from tests.support import python_device
    python_device.register("NPU-" + os.environ.get("ASCEND_DEVICE_ID", "0"), "npu", "hccl")
""")
needs_device = pytest.mark.skipif(python_device.setup is None, reason="this torch has no devices in Python")


def _packages(tmp_path, text):
    """Return an environment in which `import torch_npu` runs the text."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(text)
    return environment(PYTHONPATH=str(tmp_path))


def test_without_an_accelerator_torch_2_6_raises(monkeypatch):
    def refuse():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(
        torch, "accelerator", types.SimpleNamespace(current_accelerator=refuse), raising=False
    )
    assert accelerator.kind.__wrapped__() == "cuda"


def test_an_extension_of_torch_comes_first(monkeypatch):
    """It is imported: torch does not know its device before."""
    imported = []
    present = types.SimpleNamespace(current_accelerator=lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "accelerator", present, raising=False)
    own = types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: name == "torch_npu"))
    own.import_module = imported.append
    monkeypatch.setattr(accelerator, "importlib", own)
    assert accelerator.kind.__wrapped__() == "npu" and imported == ["torch_npu"]

    def fail(name):
        raise OSError("libascendcl.so: cannot open shared object file")

    own.import_module = fail
    with pytest.raises(BadInput, match=r"torch_npu .*libascendcl\.so.*CANN"):
        accelerator.kind.__wrapped__()
    own.util.find_spec = lambda name: None
    assert accelerator.kind.__wrapped__() == "cuda"


def test_sums_of_a_device_without_float64_are_on_the_cpu(monkeypatch):
    cpu, meta = torch.device("cpu"), torch.device("meta")
    monkeypatch.setattr(accelerator, "kind", lambda: "meta")
    monkeypatch.setattr(torch.distributed.Backend, "default_device_backend_map", {"meta": "mccl"})
    for has_float64 in (True, False):
        monkeypatch.setattr(accelerator, "has_float64", lambda device, has=has_float64: device == cpu or has)
        assert accelerator.home_of_sums(meta) == (meta if has_float64 else cpu)
        assert accelerator.home_of_sums(cpu) == cpu
        assert accelerator.backend() == ("mccl" if has_float64 else "cpu:gloo,meta:mccl")
    assert accelerator.double(torch.ones(2)).dtype == torch.float64


@pytest.mark.thorough
@needs_device
def test_an_npu_is_chosen_as_a_gpu_is(tmp_path):
    found = run(
        "-c",
        "import torch; from bootfile.ground import accelerator\n"
        "device = torch.device(accelerator.kind(), 0)\n"
        "print(device, accelerator.count(), accelerator.backend())\n"
        "print(accelerator.has_float64(device), accelerator.has_streams(device))\n",
        env=_packages(tmp_path, TORCH_NPU),
        fresh=True,
    )
    assert found.stdout == "npu:0 1 hccl\nTrue False\n"


@pytest.mark.thorough
@needs_device
def test_a_job_on_npus_that_the_platform_starts_with_a_rank_table(tmp_path):
    """The platform starts one process per NPU. The stand-in for hccl sends with gloo."""
    (tmp_path / "table.json").write_text(make_rank_table(["node_0"], 2))
    env = _packages(tmp_path, TORCH_NPU) | {"RANK_TABLE_FILE": str(tmp_path / "table.json"), "RANK_SIZE": "2"}
    jobs = [
        start(
            "jobs/loader.py", "--crop=32", "--num_workers=1", f"--result_dir={tmp_path / 'out'}", fresh=True,
            env=env | {"RANK_ID": rank, "ASCEND_DEVICE_ID": rank, "MASTER_PORT": str(port)},
        )
        for port in [free_port()] for rank in "01"
    ]  # fmt: skip
    first, second = (finish(job).stdout for job in jobs)
    assert "topology source=rank-table level=process nodes=1 processes_per_node=2 " in first
    assert "topology" not in second
    begin = json.loads((tmp_path / "out" / "starts.jsonl").read_text().splitlines()[0])
    assert begin["environment"]["backend"] == "hccl"


@pytest.mark.thorough
@needs_device
def test_processes_that_share_an_npu_are_one_line(tmp_path):
    command = ("jobs/train_ddp.py", *QUICK, f"--output_dir={tmp_path / 'out'}", "--processes_per_node=2")
    line = refused(*command, env=_packages(tmp_path, TORCH_NPU), fresh=True)
    assert names(line, "2 processes", "npu, 1")


@pytest.mark.thorough
def test_a_torch_npu_that_cannot_be_imported_is_one_line(tmp_path):
    """Without CANN its import ends with such an error."""
    env = _packages(tmp_path, 'raise ImportError("libhccl.so: cannot open shared object file")')
    line = refused("jobs/train.py", *QUICK, f"--output_dir={tmp_path / 'out'}", env=env, fresh=True)
    assert "torch_npu" in line and "libhccl.so: cannot open shared object file" in line
    assert not (tmp_path / "out").exists()
