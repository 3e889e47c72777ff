"""torchrun, torch.distributed.launch, accelerate, deepspeed, Ray's jobs and Jupyter start the job.

Receipts and states are those of the job that starts its own processes, also from a packed file.

    pip install accelerate deepspeed "ray[default]" nbclient nbformat ipykernel
    apt-get install -y openmpi-bin mpich
"""

import importlib.util
import json
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import ROOT, free_port, run, wait_until
from tests.real.launched import Launched, launch, plain, results, words
from tests.support import ray_nodes

pytestmark = pytest.mark.real
PYTHON = sys.executable
JOB = "jobs/train_ddp.py"
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def program(name: str, package: str = "") -> Path:
    """Return the path of a command that a package has installed; skip the test if it is not there."""
    if not (path := Path(sys.executable).with_name(name)).exists():
        pytest.skip(f"{name} not found: pip install {package or name}")
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return the job and all that it imports, as one file."""
    file = tmp_path_factory.mktemp("packed") / "train_ddp.py"
    run("-m", "launch", "pack", JOB, "--to", file)
    return file


def check(folder: Path, *agents: tuple, processes: int = 2, **variables: str) -> list[str]:
    """Run the commands at once, compare their results with those of the plain start, and return what each of
    them printed."""
    started = []
    try:
        for number, agent in enumerate(agents):
            started.append(Launched(folder / str(number), *agent, *words(folder), **variables).__enter__())
        printed = [agent.finish() for agent in started]
    finally:
        for agent in started:
            agent.__exit__()
    assert f"processes_per_node={processes // len(agents)} " in "".join(printed)
    assert results(folder / "out") == plain(processes)
    return printed


def with_mpirun(folder: Path, kind: str) -> str:
    """Return a PATH on which mpirun is that of Debian's package of this kind."""
    if not (mpirun := shutil.which(f"mpirun.{kind}")):
        pytest.skip(f"mpirun.{kind} not found: apt-get install -y openmpi-bin mpich")
    own = folder / "bin" / "mpirun"
    own.parent.mkdir()
    if kind == "openmpi":  # accelerate looks for its name in what it prints
        own.symlink_to(mpirun)
    else:  # it looks for its other programs next to its own name
        own.write_text(f'#!/bin/sh\nexec {mpirun} "$@"\n')
        own.chmod(0o755)
    return f"{own.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"


# torchrun


def test_torchrun_static_on_two_nodes_with_log_folders(tmp_path):
    """--redirects sends the output to files only; --tee also to files."""
    torchrun, port, logs = program("torchrun", "torch"), free_port(), tmp_path / "logs"
    fixed = (torchrun, "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}")
    first, second = check(
        tmp_path,
        (*fixed, "--node-rank=0", f"--log-dir={logs}", "--redirects=3", "--tee=1", JOB),
        (*fixed, "--node-rank=1", f"--log-dir={logs}", "--redirects=3", JOB),
    )
    assert "[default0]:topology source=torchrun level=process nodes=2 " in first and "topology" not in second
    assert "test_accuracy=" in "".join(path.read_text() for path in logs.rglob("stdout.log"))


def test_torchrun_c10d_on_two_nodes_as_a_module(tmp_path):
    at = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=7", "--nnodes=2")
    agent = (program("torchrun", "torch"), *at, "--nproc-per-node=1", "--local-addr=127.0.0.1")
    check(tmp_path, (*agent, "-m", "jobs.train_ddp"), (*agent, "-m", "jobs.train_ddp"))


def test_torchrun_standalone_without_python(tmp_path):
    torchrun = program("torchrun", "torch")
    check(tmp_path, (torchrun, "--standalone", "--nproc-per-node=2", "--no-python", PYTHON, JOB))


def test_torchrun_in_its_own_interpreters(tmp_path):
    """--run-path waits until main() has returned in each process."""
    torchrun = program("torchrun", "torch")
    check(tmp_path, (torchrun, "--standalone", "--nproc-per-node=2", "--run-path", ROOT / JOB))


# python -m torch.distributed.launch

LAUNCH = (PYTHON, "-m", "torch.distributed.launch")


def test_torch_distributed_launch_passes_local_rank(tmp_path):
    [printed] = check(tmp_path, (*LAUNCH, "--nproc_per_node=2", f"--master_port={free_port()}", JOB))
    assert " local_rank=0 " in printed


def test_torch_distributed_launch_on_two_nodes_as_a_module(tmp_path):
    fixed = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    agent = (*LAUNCH, *fixed, "--use_env", "--module")
    check(tmp_path, *((*agent, f"--node_rank={rank}", "jobs.train_ddp") for rank in (0, 1)))


def test_torch_distributed_launch_with_its_other_options(tmp_path):
    options = (
        f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_backend=c10d", "--rdzv_id=8",
        "--rdzv_conf=timeout=90", "--local_addr=127.0.0.1", "--max_restarts=1", "--monitor_interval=0.1",
        "--start_method=fork", "--role=trainer", "--event_log_handler=null", "--shutdown_timeout=20",
        "--signals_to_handle=SIGTERM,SIGUSR1", f"--log_dir={tmp_path / 'logs'}", "--tee=3",
        "--log_line_prefix_template=<${rank}>", "--local_ranks_filter=0", "--duplicate_stdout_filters=x",
    )  # fmt: skip
    agent = (*LAUNCH, "--nproc_per_node=2", "--use_env", "--no_python", *options, PYTHON, JOB)
    [printed] = check(tmp_path, agent)
    assert "<0>topology source=torchrun" in printed and "<1>" not in printed


# accelerate

ACCELERATE = ("launch", "--mixed_precision=no", "--dynamo_backend=no")


def test_accelerate_on_a_cpu_starts_one_process(tmp_path):
    check(tmp_path, (program("accelerate"), *ACCELERATE, "--cpu", "--num_processes=2", JOB), processes=1)


def test_accelerate_through_mpirun(tmp_path):
    path = with_mpirun(tmp_path, "openmpi")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    options = ("--cpu", "--num_processes=2", "--num_machines=1", f"--mpirun_hostfile={tmp_path / 'hosts'}")
    options += (f"--main_process_port={free_port()}",)
    [printed] = check(tmp_path, (program("accelerate"), *ACCELERATE, *options, JOB), PATH=path, **MPI_AS_ROOT)
    assert "topology source=openmpi" in printed


def test_accelerate_on_two_machines(tmp_path):
    fixed = ("--multi_gpu", "--num_processes=2", "--num_machines=2", "--main_process_ip=127.0.0.1")
    agent = (program("accelerate"), *ACCELERATE, *fixed, f"--main_process_port={free_port()}")
    check(tmp_path, *((*agent, f"--machine_rank={rank}", "-m", "jobs.train_ddp") for rank in (0, 1)))


# deepspeed

DEEPSPEED = {"DS_ACCELERATOR": "cpu"}


def test_deepspeed(tmp_path):
    options = ("--num_gpus=2", f"--master_port={free_port()}")
    [printed] = check(tmp_path, (program("deepspeed"), *options, JOB), **DEEPSPEED)
    assert "--local_rank=1" in printed and "topology source=launcher level=process nodes=1 " in printed


def test_deepspeed_on_two_nodes_without_ssh(tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    fixed = (f"--hostfile={tmp_path / 'hosts'}", "--no_ssh", "--master_addr=127.0.0.1", "--no_local_rank")
    agent = (program("deepspeed"), *fixed, f"--master_port={free_port()}", "--module")
    check(tmp_path, *((*agent, f"--node_rank={rank}", "jobs.train_ddp") for rank in (0, 1)), **DEEPSPEED)


@pytest.mark.parametrize("kind, source", [("openmpi", "openmpi"), ("mpich", "launcher")])
def test_deepspeed_through_mpirun(kind, source, tmp_path):
    """For MPICH, deepspeed itself sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_SIZE."""
    path = with_mpirun(tmp_path, kind)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    fixed = (f"--hostfile={tmp_path / 'hosts'}", "--force_multi", "--no_ssh_check", "--master_addr=127.0.0.1")
    agent = (program("deepspeed"), *fixed, f"--master_port={free_port()}", f"--launcher={kind}", JOB)
    [printed] = check(tmp_path, agent, PATH=path, **DEEPSPEED, **MPI_AS_ROOT)
    assert f"topology source={source} " in printed


# ray job submit


@pytest.fixture
def ray():
    """Return the command and the variables to submit a job to a Ray cluster of this machine."""
    if not importlib.util.find_spec("aiohttp_cors"):
        pytest.skip('Ray\'s dashboard is not installed: pip install "ray[default]"')
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # its sockets need a short path
    address = f"127.0.0.1:{free_port()}"
    variables = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "RAY_TMPDIR": str(folder),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    ports = {
        f"--{name}={free_port()}"
        for name in (
            "port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
            "metrics-export-port", "ray-client-server-port", "node-manager-port", "object-manager-port",
        )
    }  # fmt: skip
    fixed = ("--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1")
    command = (program("ray"), "start", *fixed, f"--dashboard-port={address.partition(':')[2]}", *ports)
    headers = {"Authorization": f"Bearer {variables['RAY_AUTH_TOKEN']}"}
    version = urllib.request.Request(f"http://{address}/api/version", headers=headers)

    def is_up() -> bool:
        try:
            return bool(json.load(urllib.request.urlopen(version, timeout=5)))
        except (urllib.error.URLError, OSError):
            return False

    with Launched(folder, *command, **variables) as head:
        wait_until(is_up, head.process)
        yield (program("ray"), "job", "submit", f"--address=http://{address}", "--"), variables
    assert not ray_nodes.processes(str(folder))
    shutil.rmtree(folder)


def test_ray_job_submit(ray, tmp_path):
    """The exit code is that of the job. What Ray runs starts in a folder of its own."""
    submit, variables = ray
    job = (*submit, PYTHON, ROOT / JOB, "--processes_per_node=2")
    [printed] = check(tmp_path, job, **variables)
    assert "succeeded" in printed
    printed = launch(tmp_path / "bad", *job, "--lr=fast", code=1, **variables)
    assert "--lr" in printed and "exit code 2" in printed


# Jupyter


def notebook(folder: Path, *cells: str) -> str:
    """Run the cells in a kernel, as Jupyter does, and return what they printed."""
    nbformat = pytest.importorskip("nbformat", reason="pip install nbformat")
    pytest.importorskip("ipykernel", reason="pip install ipykernel")
    execute = (program("jupyter-execute", "nbclient"), "--inplace", "--timeout=300")
    file = folder / "notebook.ipynb"
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(made, file)
    launch(folder / "jupyter", *execute, file)
    outputs = [output for cell in nbformat.read(file, 4).cells for output in cell.outputs]
    return "".join(output.get("text") or "[{ename}: {evalue}]".format(**output) for output in outputs)


def test_jupyter(tmp_path):
    """%run can be repeated in one kernel. After bad input the kernel runs the next cell."""
    first, second, third = (" ".join(words(tmp_path / name)) for name in ("first", "second", "third"))
    printed = notebook(
        tmp_path,
        f"%run {ROOT / JOB} {first}",
        f"%run {ROOT / JOB} --lr=fast",
        f"%run {ROOT / JOB} {second}",
        f"!{PYTHON} {ROOT / JOB} --processes_per_node=2 {third}\nprint('code', _exit_code)",
        f"!{PYTHON} {ROOT / JOB} --lr=fast\nprint('code', _exit_code)",
    )
    assert "code 0\n" in printed and "code 2\n" in printed
    assert printed.count("error: argument --lr: 'fast'") == 2 and printed.count("[SystemExit: 2]") == 1
    assert results(tmp_path / "first" / "out") == results(tmp_path / "second" / "out") == plain(1)
    assert results(tmp_path / "third" / "out") == plain(2)


def test_jupyter_with_the_packed_job(packed, tmp_path):
    """A packed job is not source code, so %run cannot read it; runpy and python can."""
    first, second = ([str(packed), *words(tmp_path / name)] for name in ("first", "second"))
    cells = [
        f"import runpy, sys; sys.argv = {first}; done = runpy.run_path(sys.argv[0], run_name='__main__')",
        f"!{PYTHON} {' '.join(second)} --processes_per_node=2",
    ]
    notebook(tmp_path, *cells)
    assert results(tmp_path / "first" / "out") == plain(1)
    assert results(tmp_path / "second" / "out") == plain(2)


# One file, and what fails


def test_torchrun_starts_the_packed_job(packed, tmp_path):
    check(tmp_path, (program("torchrun", "torch"), "--standalone", "--nproc-per-node=2", packed))


def test_accelerate_starts_the_packed_job(packed, tmp_path):
    options = ("--multi_gpu", "--num_processes=2", "--num_machines=1", f"--main_process_port={free_port()}")
    check(tmp_path, (program("accelerate"), *ACCELERATE, *options, packed))


def test_mpirun_starts_the_packed_job(packed, tmp_path):
    mpirun = with_mpirun(tmp_path, "openmpi").partition(":")[0] + "/mpirun"
    check(tmp_path, (mpirun, "--oversubscribe", "-np", 2, PYTHON, packed), **MPI_AS_ROOT)


@pytest.mark.parametrize(
    "command, code",
    [
        (("torchrun", "--standalone", "--nproc-per-node=2"), 1),
        (("python", "-m", "torch.distributed.launch", "--use_env", "--standalone", "--nproc_per_node=2"), 1),
        (("accelerate", *ACCELERATE, "--cpu"), 1),
        (("accelerate", *ACCELERATE, "--multi_gpu", "--num_processes=2", "--rdzv_backend=c10d"), 1),
        (("deepspeed", "--num_gpus=2"), 2),
    ],
    ids=["torchrun", "launch", "accelerate", "accelerate-multi", "deepspeed"],
)
def test_bad_input_is_an_error_of_the_launcher(command, code, tmp_path):
    start = (program(command[0]), *command[1:])
    printed = launch(tmp_path, *start, JOB, *words(tmp_path), "--lr=fast", code=code, **DEEPSPEED)
    assert "error: argument --lr: 'fast'" in printed
    assert not (tmp_path / "out").exists()
