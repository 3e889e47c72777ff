"""`python -m launch check` checks a node, and a job prints the findings of its node when it starts."""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import types

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.platform import node
from common.platform.place import resolve
from common.run.output import folder_of
from launch import check
from tests.conftest import ROOT, environment, finish, free_port, run, start

NAMES = [
    "accelerators", "shm", "outputs", "limits", "master", "interface", "versions", "infiniband", "presets",
]  # fmt: skip
NO_HOST = "bootfile-no-such-host.invalid"  # RFC 2606: never resolves


def _read(output: str) -> dict[str, tuple[str, str]]:
    """Return {name: (verdict, text)} of what the command has printed."""
    lines = re.findall(r"^check name=(\S+) verdict=(\S+) (.+)$", output, re.MULTILINE)
    assert [name for name, _, _ in lines] == NAMES, output
    return {name: (verdict, text) for name, verdict, text in lines}


def test_a_plain_machine(tmp_path):
    begin = time.monotonic()
    output = run("-m", "launch", "check", "--output_dir", tmp_path / "new", "--unheard_of=1").stdout
    found = _read(output)
    assert "error" not in {verdict for verdict, _ in found.values()}
    assert output.startswith("ignored arguments: --unheard_of\ntopology source=plain ")
    last = re.search(r"^check verdict=(ok|warning) exit_code=0 seconds=(\S+)\n\Z", output, re.MULTILINE)
    assert 0 <= float(last[2]) <= time.monotonic() - begin
    assert f"torch {torch.__version__}" in found["versions"][1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("arguments", "variables", "code", "wrong"), [
    # The first error gives the exit code; the others are also printed.
    (
        ["--output_dir=FILE"], {"MA_NUM_GPUS": "8"}, 10,
        {"accelerators": "promised 8 .*sees 0", "outputs": "FILE"},
    ),
    (["--output_dir=FILE/below"], {}, 12, {"outputs": "FILE/below cannot be written"}),
    (["--output_dir=s3://bucket/key"], {"BOOTFILE_SCRATCH": "/dev/null"}, 12, {"outputs": "/dev/null/"}),
    (
        [f"--init_method=tcp://{NO_HOST}:6666", "--rank=1", "--world_size=2"], {}, 14,
        {"master": f"{NO_HOST}:6666; .*does not resolve"},
    ),
])  # fmt: skip
def test_errors_have_exit_codes_and_name_the_value(
    arguments, variables, code, wrong, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "file"
    file.write_text("kept")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = [each.replace("FILE", str(file)) for each in ["--output_dir=FILE.d", *arguments]]
    assert check.main(words) == code
    output = capsys.readouterr().out
    errors = {name: text for name, (verdict, text) in _read(output).items() if verdict == "error"}
    assert errors.keys() == wrong.keys()
    for name, pattern in wrong.items():
        assert re.search(pattern.replace("FILE", re.escape(str(file))), errors[name]), errors[name]
    assert f"\ncheck verdict=error exit_code={code} " in output
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("files, processes, verdict", [
    (resource.RLIM_INFINITY, 1024, "ok"), (1023, 4096, "warning"), (4096, 128, "warning"),
    (4096, 127, "error"),
])  # fmt: skip
def test_few_open_files_or_processes(monkeypatch, files, processes, verdict):
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], 4096))
    monkeypatch.setattr(node.control_groups, "process_limits", list)
    finding = node._limits()
    assert finding.verdict == verdict and f"processes={processes}" in finding.text


@pytest.mark.parametrize("free, files, all_files, verdict", [
    (6e9, 100, 10**6, "ok"), (4e9, 100, 10**6, "warning"), (0.2e9, 100, 10**6, "error"),
    (6e9, 99, 10**6, "error"), (6e9, 0, 0, "ok"),  # a file system that does not count files
])  # fmt: skip
def test_little_room_for_results(monkeypatch, tmp_path, free, files, all_files, verdict):
    space = types.SimpleNamespace(f_bavail=free / 4096, f_frsize=4096, f_favail=files, f_files=all_files)
    monkeypatch.setattr(os, "statvfs", lambda folder: space)
    assert node._outputs(str(tmp_path / "new"), str).verdict == verdict


@pytest.mark.skipif(sys.platform != "linux", reason="no /dev/shm")
@pytest.mark.parametrize("free, verdict", [(2e9, "ok"), (0.9e9, "warning"), (0.5e6, "error")])
def test_little_shared_memory(monkeypatch, free, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (4e9, 4e9 - free, free))
    assert node._shm().verdict == verdict


@pytest.mark.thorough
def test_few_open_files(tmp_path):
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))}
    found = _read(run("-m", "launch", "check", "--output_dir", tmp_path, code=13, **limit).stdout)
    assert found["limits"][0] == "error" and re.match("open_files=100 .*ulimit -n 1024", found["limits"][1])


@pytest.mark.thorough
def test_little_shared_memory_and_a_small_disk():
    script = f"""mount -t tmpfs -o size=64m none /dev/shm
    {sys.executable} -m launch check --output_dir /dev/shm/results"""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *root, "--mount", "sh", "-ec"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip(f"not allowed here: {' '.join(command)}")
    result = subprocess.run([*command, script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert result.returncode == 12, result.stderr
    assert re.search("name=shm verdict=warning 0.1 GB of 0.1 GB free at /dev/shm; below 1 GB", result.stdout)
    assert re.search("name=outputs verdict=error 0.1 GB free at /dev/shm/results; no room", result.stdout)


def _args(**given):
    names = ("init_method", "rank", "world_size", "local_rank", "enable_gpu")
    return argparse.Namespace(
        **dict.fromkeys(names) | {"processes_per_node": 1, "output_dir": "/tmp"} | given
    )


def _inspect(env=None, **given):
    args = _args(**given)
    findings = node.inspect(args, env or {}, resolve(args, {}), folder_of)
    return {finding.name: (finding.verdict, finding.text) for finding in findings}


def test_masters_of_other_layouts():
    found = _inspect(init_method="tcp://127.0.0.1:6666", rank=1, world_size=2)
    assert found["master"] == ("ok", "127.0.0.1:6666 is 127.0.0.1")
    assert found["interface"][0] == "warning", "two nodes can use loopback only on one machine"
    assert found["interface"][1].startswith("lo with 127.0.0.1; 2 nodes, but 127.0.0.1")
    found = _inspect(init_method=f"tcp://{NO_HOST}:6666", rank=0, world_size=1)
    assert found["master"] == ("ok", "none needed: one node")
    assert found["interface"] == ("ok", "loopback: one node")


def test_versions_of_ascend(tmp_path):
    assert node._ascend(str(tmp_path)) == {}
    toolkit = tmp_path / "ascend-toolkit" / "latest" / "aarch64-linux"
    for folder in (tmp_path / "driver", toolkit):
        folder.mkdir(parents=True)
    (tmp_path / "driver" / "version.info").write_text("Version=24.1.rc2\nascendhal_version=7.35.19\n")
    install = "package_name=Ascend-cann-toolkit\nversion=8.0.RC2\ninnerversion=V100R001C18\n"
    (toolkit / "ascend_toolkit_install.info").write_text(install)
    assert node._ascend(str(tmp_path)) == {"NPU driver": "24.1.rc2", "CANN": "8.0.RC2"}


def test_presets_are_shown_and_never_changed():
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO"}
    presets, before = dict(env), dict(os.environ)
    assert _inspect(env)["presets"] == ("ok", "GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=INFO")
    assert env == presets and dict(os.environ) == before and not torch.cuda.is_initialized()


def test_first_lines_of_a_job(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    args = _args(output_dir=str(tmp_path / "results"))
    topology = resolve(args, {})
    began = time.thread_time()  # of the processor: others may keep it busy
    node.print_findings(args, topology, args.output_dir)
    assert time.thread_time() - began < 0.3
    first, *others = capsys.readouterr().out.splitlines()
    assert re.match(rf"preflight \w+: .*torch {re.escape(torch.__version__)}, .* 0 GPUs, .*shm ", first)
    assert "presets NCCL_DEBUG=WARN" in first
    assert first.startswith("preflight warning: " if others else "preflight ok: ")


def test_infiniband_ports_and_peer_memory(tmp_path):
    """The files are those of a node with two ports; the kernel's own cannot be made."""
    one, two = resolve(_args(), {}), resolve(_args(init_method="h:1", rank=0, world_size=2), {})
    assert node.infiniband(one, str(tmp_path)).text == "no ports; peer memory none"
    for device, state, layer, rate in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "1: DOWN", "Ethernet", "100 Gb/sec (4X EDR)"),
    ):
        port = tmp_path / "sys" / "class" / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in {"state": state, "link_layer": layer, "rate": rate}.items():
            (port / name).write_text(f"{text}\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "modules").write_text("nvidia 1 2 nvidia_peermem, Live 0x0\n")
    found = node.infiniband(two, str(tmp_path))
    assert found.verdict == "ok" and found.text == (
        "mlx5_0/1 ACTIVE InfiniBand 400 Gb/sec (4X NDR), mlx5_1/1 DOWN Ethernet 100 Gb/sec (4X EDR); "
        "peer memory none"
    )
    (tmp_path / "proc" / "modules").write_text("nvidia_peermem 16384 0 - Live 0x0\n")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("2: INIT\n")
    found = node.infiniband(two, str(tmp_path))
    assert found.verdict == "warning" and "peer memory nvidia_peermem" in found.text
    assert node.infiniband(one, str(tmp_path)).verdict == "ok", "one node needs no port"


def test_nodes_measure_an_all_reduce(tmp_path):
    """Two nodes of two processes, each started as the platform starts a job."""
    common = ["--output_dir", tmp_path, "--enable_gpu=false", "--processes_per_node=2", "--world_size=2"]
    address = f"--init_method=tcp://127.0.0.1:{free_port()}"
    words = ["-m", "launch", "check", "--nodes", address, *common]
    nodes = [start(*words, f"--rank={rank}") for rank in range(2)]
    outputs = [finish(each, 0).stdout for each in nodes]
    pattern = r"^all_reduce bytes=100000000 ranks=4 backend=gloo seconds=(\S+) bus_gb_per_s=(\S+)$"
    ((seconds, bus),) = re.findall(pattern, "".join(outputs), re.MULTILINE)
    assert float(bus) == pytest.approx(1.5 * 0.1 / float(seconds), rel=0.05)
    assert [output.count("check verdict=") for output in outputs] == [1, 1]
    with pytest.raises(BadInput, match="--nodes needs 2 processes or more"):
        check.main(["--nodes"])
