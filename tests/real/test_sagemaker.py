"""The SDKs of SageMaker take the files of `submit` and of the guide, and a job runs in the SDK's own scripts.

A server of this machine (moto) stands for the service. A container is a process of new namespaces, in which
/opt/ml is a folder of the test; as in a container, its first process gets SIGTERM.

    sh tests/real/install.sh PYTHON
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.platforms import config as job_config
from launch.platforms import templates
from tests.conftest import ROOT, free_port
from tests.real.launched import Launched
from tests.support.object_store_server import ObjectStoreServer

pytestmark = pytest.mark.real
JOB = "jobs/train_ddp.py"
GUIDE = ROOT / "guides" / "sagemaker"
SETTINGS = """
name = "small"
code = "s3://bucket/code/bootfile-0123456789ab"
[resources]
node_count = {nodes}
gpus_per_node = 2
[retries]
faults = 3
[auto_stop]
hours = 2
[inputs]
data_url = "s3://data/digits"
[outputs]
train_url = "s3://runs/small"
[parameters]
{parameters}
[platform.sagemaker]
image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.1"
role_arn = "arn:aws:iam::123456789012:role/training"
instance_type = "ml.p4d.24xlarge"
spot_wait_hours = 3
{settings}
"""
# so that the SDK asks no other address: its telemetry, and the account's default bucket
SDK_SETTINGS = {
    "SchemaVersion": "1.0",
    "SageMaker": {
        "PythonSDK": {"Modules": {"TelemetryOptOut": True, "Session": {"DefaultS3Bucket": "bucket"}}}
    },
}


def python_of(major: int) -> Path:
    """Return the Python of the environment with an SDK; skip the test without it."""
    path = Path(sys.prefix, f"sagemaker-{major}", "bin", "python")
    if not path.exists():
        pytest.skip(f"{path} not found: sh tests/real/install.sh {sys.executable}")
    return path


@pytest.fixture(scope="module")
def service():
    with ObjectStoreServer("bucket", "data", "runs") as server:
        yield server


def create(service: ObjectStoreServer, folder: Path, python: Path, file: str) -> dict:
    """Run a file of an SDK, and return the training job that it has created."""
    import boto3

    url = service.environment["AWS_ENDPOINT_URL_S3"]
    settings = folder / "sdk.yaml"
    settings.write_text(yaml.safe_dump(SDK_SETTINGS))
    (folder / "file.py").write_text(file)
    env = os.environ | service.environment | {
        "AWS_ENDPOINT_URL": url, "AWS_MAX_ATTEMPTS": "1", "SAGEMAKER_VALIDATE_ROLE": "false",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(settings), "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
    }  # fmt: skip
    client = boto3.client("sagemaker", endpoint_url=url, region_name="us-east-1",
                          aws_access_key_id="testing", aws_secret_access_key="testing")  # fmt: skip
    before = {job["TrainingJobName"] for job in client.list_training_jobs()["TrainingJobSummaries"]}
    words = [python, folder / "file.py"]
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = {job["TrainingJobName"] for job in client.list_training_jobs()["TrainingJobSummaries"]}
    [name] = after - before
    return client.describe_training_job(TrainingJobName=name)


def submit(service, folder: Path, nodes: int, parameters: dict, settings: str = "") -> dict:
    """Create the job that `submit` writes for SDK v3."""
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in parameters.items())
    path = folder / "job.toml"
    path.write_text(SETTINGS.format(nodes=nodes, parameters=lines, settings=settings))
    config = job_config.load(str(path), JOB, "sagemaker-sdk")
    return create(service, folder, python_of(3), templates.render("sagemaker-sdk", config, "small-1"))


class Container(Launched):
    """The container of a node: the scripts that the SDK has uploaded start the job."""

    def __init__(self, service: ObjectStoreServer, folder: Path, job: dict, node: int, nodes: int, port: int):
        if os.geteuid() or subprocess.run(["unshare", "-mpuf", "true"], capture_output=True).returncode:
            pytest.skip("new namespaces need root")
        self.inner = folder / "opt"
        data = self.inner / "ml" / "input" / "data"
        for name in ("input/config", "input/data/code", "checkpoints", "output", "model"):
            (self.inner / "ml" / name).mkdir(parents=True)
        hosts = [f"algo-{number + 1}" for number in range(nodes)]
        channels = {channel["ChannelName"]: channel["DataSource"] for channel in job["InputDataConfig"]}
        bucket, _, prefix = channels["sm_drivers"]["S3DataSource"]["S3Uri"][5:].partition("/")
        listed = service.client().list_objects_v2(Bucket=bucket, Prefix=prefix)
        for entry in listed["Contents"]:
            target = data / "sm_drivers" / entry["Key"][len(prefix) :].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            service.client().download_file(bucket, entry["Key"], str(target))
        files = {
            "resourceconfig": {
                "current_host": hosts[node], "hosts": hosts, "network_interface_name": "lo",
                "current_instance_type": job["ResourceConfig"]["InstanceType"],
            },
            "inputdataconfig": {name: {"TrainingInputMode": "File"} for name in channels},
            "hyperparameters": job["HyperParameters"],
        }  # fmt: skip
        for name in channels:
            (data / name).mkdir(exist_ok=True)
        for name, content in files.items():
            (self.inner / "ml" / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
        names = folder / "hosts"
        names.write_text(f"127.0.0.1 localhost {' '.join(hosts)}\n")
        script = (
            f"hostname {hosts[node]}; mount --bind {names} /etc/hosts; mount --bind {ROOT} {data}/code; "
            f'mount --rbind {self.inner} /opt; exec "$@"'
        )
        algorithm = job["AlgorithmSpecification"]
        command = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
        namespaces = ("unshare", "-mpuf", "--mount-proc", "--kill-child", "sh", "-c", script, "-")
        variables = {"TRAINING_JOB_NAME": job["TrainingJobName"], "MASTER_PORT": str(port)}
        super().__init__(folder, *namespaces, *command, **variables)

    def terminate(self) -> None:
        """Send SIGTERM to the container's first process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        os.kill(int(children.read_text().split()[0]), signal.SIGTERM)


SMALL = {
    "dataset": "digits", "width": 8, "batch_size": 64, "report_every": 1, "save_every": "1000000",
    "enable_gpu": False, "epochs": 1000, "threads": 1,
}  # fmt: skip


def test_the_file_of_sdk_v3_creates_the_job(service, tmp_path):
    job = submit(service, tmp_path, 2, {"epochs": 3, "note": """it's "a" $(date) `x` {b}"""})
    assert job["EnableManagedSpotTraining"] is True
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 5 * 3600}
    assert job["CheckpointConfig"] == {"S3Uri": "s3://runs/small/small-1", "LocalPath": "/opt/ml/checkpoints"}
    assert job["ResourceConfig"]["InstanceCount"] == 2 and job["HyperParameters"] == {}
    channels = {channel["ChannelName"]: channel["DataSource"] for channel in job["InputDataConfig"]}
    assert set(channels) == {"code", "data_url", "sm_drivers"}
    assert channels["code"]["S3DataSource"]["S3Uri"] == "s3://bucket/code/bootfile-0123456789ab/"


def test_a_job_of_two_nodes_in_the_scripts_of_the_sdk_saves_at_sigterm(service, tmp_path):
    job = submit(service, tmp_path, 2, SMALL | {"processes_per_node": 2})
    port = free_port()
    nodes = [Container(service, tmp_path / str(node), job, node, 2, port) for node in range(2)]
    with nodes[0], nodes[1]:
        nodes[0].wait_for_step(2)
        for node in nodes:
            node.terminate()
        printed = [node.finish(128 + signal.SIGTERM) for node in nodes]
    for node, text in enumerate(printed):
        assert f"topology source=sagemaker level=node nodes=2 processes_per_node=2 node_rank={node} " in text
        assert f"SM_CURRENT_HOST_RANK={node}" in text
    assert "within 100 s" in printed[0], "the grace of this platform"
    step = re.search(r"the newest checkpoint is that of step (\d+)", printed[0])[1]
    assert (nodes[0].inner / "ml" / "checkpoints" / "checkpoints" / f"step_{step}.pt").exists()


def test_torchrun_of_the_sdk_trains_and_does_not_pass_sigterm_on(service, tmp_path):
    """The guide says so; if a later SDK passes it on, the guide changes."""
    job = submit(service, tmp_path, 1, SMALL, "torchrun = true")
    with Container(service, tmp_path / "0", job, 0, 1, free_port()) as node:
        node.wait_for_step(2)
        node.terminate()
        last = int(re.findall(r" step=(\d+)/", node.printed())[-1])
        node.wait_for_step(last + 5)
        assert "topology source=torchrun level=process nodes=1 processes_per_node=2 " in node.printed()
        assert "SIGTERM" not in node.printed()


def test_the_estimator_of_sdk_v2_in_the_guide(service, tmp_path):
    file = (GUIDE / "estimator.py").read_text(encoding="utf-8")
    (tmp_path / "packed" / "jobs").mkdir(parents=True)
    (tmp_path / "packed" / JOB).touch()
    job = create(service, tmp_path, python_of(2), file)
    assert job["EnableManagedSpotTraining"] is True
    assert job["CheckpointConfig"]["LocalPath"] == "/opt/ml/checkpoints"
    assert json.loads(job["HyperParameters"]["train_url"]) == "/opt/ml/checkpoints"


def test_the_configuration_of_hyperpod_in_the_guide(tmp_path):
    """By the schema of hyperpod-pytorch-job-template, whose type `float` is not one of JSON Schema."""
    text = (GUIDE / "config.yaml").read_text(encoding="utf-8")
    check = (
        "import importlib.resources, json, sys\nimport jsonschema\n"
        "folder = importlib.resources.files('hyperpod_pytorch_job_template')\n"
        "schema = json.loads((folder / 'v1_1' / 'schema.json').read_text())\n"
        "jsonschema.Draft202012Validator(schema).validate(json.load(sys.stdin))\n"
    )
    content = yaml.safe_load(text)
    assert text.startswith("# template: hyp-pytorch-job\n# version: 1.1\n")
    words = [python_of(3), "-c", check]
    done = subprocess.run(words, input=json.dumps(content), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [key for key in content if key.startswith("elastic")]
