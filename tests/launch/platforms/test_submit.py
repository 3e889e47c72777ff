"""`submit` makes requests, command lines and other platforms' files from job.toml, without a network."""

import argparse
import ast
import json
import re
import shlex
import subprocess
from pathlib import Path

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator

from bootfile.ground.errors import BadInput
from common.platform.place import resolve
from launch.platforms import config as job_config
from launch.platforms import request as job_request
from launch.platforms import submit, templates
from launch.profiles import Folders, make_starts
from tests.conftest import ROOT, environment, run, write_program
from tests.support.modelarts_body import check_job

EXAMPLE = ROOT / "launch" / "job.example.toml"
JOB = "jobs/train_ddp.py"
SMALL = """
name = "small"
code = "obs://bucket/code/bootfile-0123456789ab"
region = "cn-north-4"
[image]
image_url = "organisation/image:1"
[resources]
pool_id = "pool-1"
"""
_OFFLINE = """
import socket, sys
def refuse(*_, **__): raise OSError("this process has no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {missing}: raise ImportError(f"{{name}} is not there", name=name)
sys.meta_path.insert(0, Missing())
open({mark!r}, "w").close()
"""


def _blocked(folder: Path, *missing: str) -> dict[str, str]:
    """Return the environment of a process without network, keys and the named packages."""
    mark = folder / "blocked"
    (folder / "sitecustomize.py").write_text(_OFFLINE.format(missing=missing, mark=str(mark)))
    kept = environment(PYTHONPATH=str(folder))
    return {name: value for name, value in kept.items() if not re.match("HUAWEI|AWS_|OBS_|MODELARTS_", name)}


def _config(tmp_path, text: str, platform="modelarts"):
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return job_config.load(str(path), JOB, platform)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--init_method")
    for name in ("--rank", "--world_size", "--processes_per_node"):
        parser.add_argument(name, type=int)
    return parser.parse_known_args(words)[0]


def test_a_dry_run_needs_no_network_no_keys_and_no_sdk(tmp_path):
    env = _blocked(tmp_path, "huaweicloudsdkmodelarts", "huaweicloudsdkcore", "boto3", "botocore", "torch")
    result = run("-m", "launch", "submit", JOB, "--config", EXAMPLE, "--dry_run", env=env)
    assert (tmp_path / "blocked").exists() and result.stderr == ""
    body, end = json.JSONDecoder().raw_decode(result.stdout)
    check_job(body)
    found = re.findall(r"^node (\d+): (.+)\n((?:  .+\n?)+)", result.stdout[end:], re.MULTILINE)
    assert [number for number, _, _ in found] == ["0", "1"]
    for node, (_, command, variables) in enumerate(found):
        words = shlex.split(command)
        assert words[0] == "python" and words[1].endswith(f"/user-job-dir/bootfile-0123456789ab/{JOB}")
        assert {"--dataset=cifar10", "--enable_gpu=true", "--lr=0.1"} < set(words)
        assert "--data_url=/home/ma-user/modelarts/inputs/data_url_0" in words
        assert "--train_url=/home/ma-user/modelarts/outputs/train_url_0" in words
        env = dict(line.strip().replace("'", "").split("=", 1) for line in variables.splitlines())
        assert env["PYTHONUNBUFFERED"] == "1" and env["OMP_NUM_THREADS"] == "8" and env["MA_NUM_GPUS"] == "8"
        place = resolve(_arguments(words), env)
        assert (place.nodes, place.node_rank, place.master_port) == (2, node, 6666)
        assert place.master_host == "modelarts-job-simulated-worker-0.modelarts-job-simulated"


def test_no_platform_but_modelarts_is_sent_to(capsys):
    words = [JOB, "--config", str(EXAMPLE), "--platform", "slurm"]
    with pytest.raises(BadInput, match=r"slurm .*--dry_run .*sbatch FILE"):
        submit.main(words)
    assert _submit(capsys, *words).startswith("#!/bin/bash\n#SBATCH --job-name=train-ddp-")


def test_the_boot_file_exists():
    for job in ("jobs/my.py", "train_ddp.py"):
        with pytest.raises(BadInput, match=f"JOB {job}: no such file "):
            submit.main([job, "--config", str(EXAMPLE), "--dry_run"])
    for job in ("/jobs/x.py", "../x.py", "jobs/x", "jobs/../../x.py", "jobs/x.py; rm", ""):
        with pytest.raises(BadInput, match=r"path .*\.py file"):
            job_config.load(str(EXAMPLE), job)


def test_small_and_custom_jobs_are_requests_that_the_service_takes(tmp_path):
    config = _config(tmp_path, SMALL)
    body = job_request.make_body(config, {})
    check_job(body)
    assert body["spec"] == {"resource": {"node_count": 1, "pool_id": "pool-1"}}
    ((command, variables),) = job_request.make_node_starts(config, {})
    assert command == f"python /home/ma-user/modelarts/user-job-dir/bootfile-0123456789ab/{JOB}"
    assert "MASTER_PORT" not in variables
    text = SMALL.replace(':1"\n', ':1"\ncommand = "bash run.sh"\n') + "[parameters]\nname = 'a b'\n"
    config = _config(tmp_path, text)
    assert job_request.make_node_starts(config, {})[0][0] == "bash run.sh '--name=a b'"
    assert job_request.make_body(config, {})["algorithm"]["parameters"] == [{"name": "name", "value": "a b"}]
    with pytest.raises(BadInput, match=r"\[platform.slurm\] is missing"):
        _config(tmp_path, SMALL, "slurm")


def test_volumes_hold_data_and_results(tmp_path, capsys):
    text = _example(
        ("[inputs]", """[volumes]
"/mnt/runs" = "10.10.10.10:/runs/"
"/mnt/data" = "pfs://bucket/data"
"/mnt/code" = "obs://bucket/code/more"
[inputs]"""),
        ('"obs://bucket/data/cifar10"', '"/mnt/data/cifar10"\nmore = "obs://bucket/more"'),
        ('"obs://bucket/runs"', '"/mnt/runs/1"'),
        ("prefetch_to_local = true", "prefetch_to_local = false"),
        ("# pool_id", "pool_id"),
        ("faults = 3", "faults = 3\npods = 2\nunconditional = true\nhang = true\nhccl_op = false"),
    )  # fmt: skip
    text += "[schedule]\naffinity_type = 'cabinet'\npriority = 2\n"
    text += "[notification]\ntopic_urn = 'urn:smn:x'\nevents = ['JobFailed']\n"
    config = _config(tmp_path, text)
    outputs = job_request.make_outputs(config.outputs, "run-1")
    body = job_request.make_body(config, outputs)
    check_job(body)
    assert body["spec"]["volumes"] == [
        {"nfs": {"nfs_server_path": "10.10.10.10:/runs", "local_path": "/mnt/runs", "read_only": False}},
        {"pfs": {"pfs_path": "/bucket/data", "local_path": "/mnt/data"}},
        {"obs": {"obs_path": "/bucket/code/more", "local_path": "/mnt/code"}},
    ]
    assert body["spec"]["schedule_policy"] == {
        "priority": 2, "required_affinity": {"affinity_type": "cabinet"}
    }  # fmt: skip
    assert body["metadata"]["annotations"] == {
        "fault-tolerance/job-retry-num": "3", "fault-tolerance/pod-retry-num": "2",
        "fault-tolerance/job-unconditional-retry": "true", "fault-tolerance/hang-retry": "true",
        "fault-tolerance/hccl_op_retry": "false",
    }  # fmt: skip
    assert body["spec"]["auto_stop"] == {"time_unit": "HOURS", "duration": 24}
    assert body["spec"]["notification"] == {"topic_urn": "urn:smn:x", "events": ["JobFailed"]}
    algorithm = body["algorithm"]
    assert algorithm["outputs"] == [] and [each["name"] for each in algorithm["inputs"]] == ["more"]
    assert {"name": "train_url", "value": "/mnt/runs/1/run-1"} in algorithm["parameters"]
    command, _ = job_request.make_node_starts(config, outputs)[1]
    words = {"--data_url=/mnt/data/cifar10", "--train_url=/mnt/runs/1/run-1"}
    assert words | {"--more=/home/ma-user/modelarts/inputs/more_1"} < {*shlex.split(command)}
    command = [JOB, "--config", str(tmp_path / "job.toml"), "--dry_run", "--resume_from"]
    assert "--train_url=/mnt/runs/earlier " in _submit(capsys, *command, "/mnt/runs/earlier")
    assert "/else/earlier is not in a folder of [volumes]" in _submit(capsys, *command, "/else/earlier")
    assert _submit(capsys, *command, "/").startswith("/ is not s3://bucket/prefix")


def test_all_of_a_share_is_a_volume(tmp_path):
    text = _example(("[inputs]", '[volumes]\n"/mnt/runs" = "10.10.10.10:/"\n[inputs]'))
    (volume,) = job_request.make_body(_config(tmp_path, text), {})["spec"]["volumes"]
    assert volume["nfs"]["nfs_server_path"] == "10.10.10.10:/"
    job = {"name": "a", "image": {"image_url": "x", "command": None}, "resources": {"pool_id": "p"}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job | {"code": "obs://bucket/code/name-0123456789ab"}))
    assert job_config.load(str(path), JOB).image.command is None
    with pytest.raises(BadInput, match=r"^JOB \.\./x\.py: expected the path"):
        job_config.load(str(path), "../x.py")


def _example(*replacements: tuple[str, str]) -> str:
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


CHANGES = [  # part of the example, its replacement, words of the error
    ('name = "train-ddp"', 'name = "x"\nregoin = "x"', "regoin: unknown key: expected one of "),
    ('name = "train-ddp"', f"name = {'[' * 100_000}", "is not TOML: "),
    ("code/bootfile-0123456789ab", "code/bootfile", "not the URL"),
    ('"obs://bucket/code/', '"obs://me:pw@bucket/code/', "holds a user name or a password"),
    ('engine_name = "PyTorch"', "", "[image] has engine_version: expected engine_name, engine_version, or"),
    ('engine_name = "PyTorch"', 'engine_name = "P"\ncommand = "x"', "[image] has command, engine_name, "),
    ('flavor_id = "modelarts.pool.visual.8xlarge"', "", "[resources] has neither flavor_id nor pool_id"),
    ("node_count = 2", "node_count = 1_000_000_000", "less than or equal to 10000"),
    ('data_url = "obs', 'rank = "obs', "[inputs] rank: the platform"),
    ('"obs://bucket/runs"', '"obs://bucket/runs"\nmore = "obs://bucket/runs/"', "has the same URL twice"),
    ("epochs = 20", "data_url = 'x'", "data_url is given twice"),
    ('"obs://bucket/runs"', '"/"', "expected obs://"),
    ('name = "train-ddp"', 'name = "x"\njob = "jobs/train.py"', "job: unknown key: JOB is an argument"),
    ("epochs = 20", 'epochs = "2\\u0085"', "[parameters] epochs: expected a text of one line"),
    ('OMP_NUM_THREADS = "8"', 'RANK = "0"', "[environment] RANK: the platform"),
    ('OMP_NUM_THREADS = "8"', 'A = "$HOME/x"', "[environment] A: "),
    ("[auto_stop]", "[schedule]\npriority = 1\n[auto_stop]", "[schedule] needs a dedicated pool"),
    ('"obs://bucket/runs"', '"/mnt/runs"', "/mnt/runs is not in a folder"),
    (
        "[inputs]",
        '[volumes]\n"/mnt" = "nfs://host/x"\n[inputs]',
        "[volumes] /mnt: expected HOST:/PATH, pfs://",
    ),
    ("[auto_stop]", '[notification]\ntopic_urn = "u"\n[auto_stop]', "needs topic_urn and events"),
    ("faults = 3", "pods = 3\nhang = true", "[retries] pods, hang: the service needs faults with it"),
    ("[platform.slurm]", "[platform.lsf]", "[platform] lsf: "),
    ('partition = "gpu"', "partition = [1]", "[platform.slurm] partition: "),
]


KUBEFLOW = ("kubeflow", "kubeflow-v1")


@pytest.mark.parametrize("line", ["", 'PYTHONUNBUFFERED = "0"\n'], ids=["not given", "given"])
@pytest.mark.parametrize("count", [99, 100, 101])
def test_a_job_has_at_most_100_variables(count, line, tmp_path):
    """As the service gets them: with PYTHONUNBUFFERED, which is always one of them."""
    lines = line + "\n".join(f"A{n} = 1" for n in range(count - 1))
    example = _example(('OMP_NUM_THREADS = "8"', lines))
    if count > 100:
        with pytest.raises(
            BadInput, match=r"\[environment\] has 101 variables, with PYTHONUNBUFFERED.* 100$"
        ):
            _config(tmp_path, example)
        assert len(_config(tmp_path, example, "kubernetes").environment) == count
        return
    environments = job_request.make_body(_config(tmp_path, example), {})["algorithm"]["environments"]
    assert len(environments) == count and environments["PYTHONUNBUFFERED"] == ("0" if line else "1")


def test_the_interface_is_the_user_s_except_on_modelarts(tmp_path):
    text = _example(('OMP_NUM_THREADS = "8"', 'NCCL_SOCKET_IFNAME = "eth0"'))
    for platform in ("slurm", "kubernetes"):
        script = templates.render(platform, _config(tmp_path, text, platform), "run-1")
        assert "NCCL_SOCKET_IFNAME" in script
    with pytest.raises(BadInput, match=r"\[environment\] NCCL_SOCKET_IFNAME: ModelArts sets this variable"):
        _config(tmp_path, text)


SECRETS = [  # a value that may be a secret, in place of `epochs = 20`, and words of the error
    ('AWS_SECRET_ACCESS_KEY = "hunter2"', "looks like a secret"),
    ('URL = "redis://me:hunter2@host"', "looks like a secret"),
    (f'X = """\n-----BEGIN {"OPENSSH"} PRIVATE KEY-----\nhunter2\n"""', "looks like a secret"),
    (f'X = "AKIA{"Q3WE5RTY7UIO9PAS"} hunter2"', "looks like a secret"),
    ('PASSWORD = ["hunter2"]', "looks like a secret"),
    ('X = { y = "hunter2" }', "expected a text"),
]


@pytest.mark.parametrize(("old", "new", "message"), CHANGES, ids=range(len(CHANGES)))
def test_every_mistake_is_one_line_with_the_key_and_the_reason(old, new, message, tmp_path):
    with pytest.raises(BadInput) as error:
        _config(tmp_path, _example((old, new)))
    text = str(error.value)
    assert text.startswith(f"{tmp_path}/job.toml: ") and message in text and "pw" not in text
    assert "\n" not in text


@pytest.mark.parametrize("old", ["epochs = 20", 'OMP_NUM_THREADS = "8"'])
@pytest.mark.parametrize(("line", "message"), SECRETS, ids=range(len(SECRETS)))
def test_a_value_that_may_be_a_secret_is_not_shown(old, line, message, tmp_path):
    with pytest.raises(BadInput, match=message) as error:
        _config(tmp_path, _example((old, line)))
    assert "hunter2" not in str(error.value) and "Q3WE5RTY7UIO9PAS" not in str(error.value)


def test_what_only_sounds_like_a_secret_is_taken(tmp_path):
    text = '[parameters]\nmax_tokens = 5\ntokenizer = "bpe"\n[environment]\nTOKENIZERS_PARALLELISM = false\n'
    config = _config(tmp_path, SMALL + text)
    assert config.parameters == {"max_tokens": "5", "tokenizer": "bpe"}
    assert config.environment == {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _submit(capsys, *words) -> str:
    """Return what `submit --dry_run` prints, or the error."""
    capsys.readouterr()
    try:
        submit.main([*map(str, words), "--dry_run"])
    except BadInput as error:
        return str(error)
    return capsys.readouterr().out


def test_resuming_needs_the_earlier_outputs(tmp_path, capsys):
    words = (JOB, "--resume_from", "obs://bucket/runs/earlier", "--config")
    body, _ = json.JSONDecoder().raw_decode(_submit(capsys, *words, EXAMPLE))
    (output,) = body["algorithm"]["outputs"]
    assert output["remote"]["obs"]["obs_url"] == "/bucket/runs/earlier/"
    assert output["prefetch_to_local"] is True
    other = tmp_path / "job.toml"
    other.write_text(_example(("prefetch_to_local = true", "prefetch_to_local = false")))
    assert "--resume_from needs prefetch_to_local = true" in _submit(capsys, *words, other)
    other.write_text(SMALL)
    assert re.search(r"--resume_from .*train_url: \[outputs\] .*none", _submit(capsys, *words, other))
    config = job_config.load(str(EXAMPLE), JOB, "slurm")
    script = templates.render("slurm", config, "run-1", "/shared/runs/earlier/")
    assert ' --train_url=/shared/runs/earlier"${SLURM_ARRAY_TASK_ID' in script
    with pytest.raises(BadInput, match="earlier is not s3://bucket/prefix"):
        templates.render("slurm", config, "run-1", "earlier")


def _check_layout(platform, nodes, gpus, env, words):
    """The variables of each process that the platform starts, and those of the file, give the layout."""
    hosts = [f"node-{number}" for number in range(nodes)]
    folders = Folders("/code", "/in", "/out", "/cache", "/log")
    places = [
        resolve(_arguments(words), env | start.environment)
        for node in range(nodes)
        for start in make_starts(platform, node, nodes, gpus or 1, hosts, 23456, folders, gpus)
    ]
    started = gpus or 1 if platform == "slurm" else 1  # processes that the platform starts on each node
    assert [place.node_rank for place in places] == [node for node in range(nodes) for _ in range(started)]
    assert {place.nodes for place in places} == {nodes}
    if gpus:
        assert {place.world_size for place in places} == {nodes * gpus}
    assert {place.master_host for place in places} == {"node-0"}


@pytest.fixture(params=[(2, 8), (1, 1), (3, 0)], ids=["2x8", "1x1", "3 CPU nodes"])
def layout(request, tmp_path):
    """Return (nodes, GPUs of each, load): load(platform) reads the example with these numbers."""
    nodes, gpus = request.param
    text = _example(
        ("node_count = 2", f"node_count = {nodes}"), ("gpus_per_node = 8", f"gpus_per_node = {gpus}")
    )
    return nodes, gpus, lambda platform: _config(tmp_path, text, platform)


def test_pai_dlc_file(layout):
    nodes, gpus, load = layout
    job = json.loads(templates.render("pai-dlc", load("pai-dlc"), "run-1"))
    (spec,) = job["JobSpecs"]
    words = shlex.split(job["UserCommand"])
    assert job["JobType"] == "PyTorchJob" and spec["PodCount"] == nodes and spec["Type"] == "Worker"
    assert words[:2] == ["python", f"/mnt/code/bootfile-0123456789ab/{JOB}"]
    assert "--train_url=/mnt/runs/run-1" in words and "--data_url=obs://bucket/data/cifar10" in words
    assert job["Envs"]["PYTHONUNBUFFERED"] == "1" and job["JobMaxRunningTimeMinutes"] == 1440
    if gpus:
        _check_layout("pai-dlc", nodes, gpus, job["Envs"], words)


def test_sagemaker_file(layout, tmp_path):
    """The file fits botocore's model of the service, and the job reads the service's file."""
    nodes, _, load = layout
    job = json.loads(templates.render("sagemaker", load("sagemaker"), "my_run-1"))
    service = botocore.session.get_session().get_service_model("sagemaker")
    shape = service.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(job, shape)
    assert not report.has_errors(), report.generate_report()
    assert job["TrainingJobName"] == "my-run-1" and job["ResourceConfig"]["InstanceCount"] == nodes
    assert job["CheckpointConfig"]["S3Uri"] == "s3://bucket/runs/my_run-1"
    assert [channel["ChannelName"] for channel in job["InputDataConfig"]] == ["code", "data_url"]
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400}
    assert job["EnableManagedSpotTraining"] is False

    algorithm = job["AlgorithmSpecification"]
    assert algorithm["ContainerEntrypoint"] == ["python", f"/opt/ml/input/data/code/{JOB}"]
    words = algorithm["ContainerArguments"]
    assert "--train_url=/opt/ml/checkpoints" in words and "--data_url=/opt/ml/input/data/data_url" in words
    hosts = [f"algo-{number}" for number in range(1, nodes + 1)]
    for node, host in enumerate(hosts):
        content = {"current_host": host, "hosts": hosts, "network_interface_name": "eth0"}
        (tmp_path / "resourceconfig.json").write_text(json.dumps(content))
        found = resolve(_arguments(words), job["Environment"] | {"SM_INPUT_CONFIG_DIR": str(tmp_path)})
        assert (found.source, found.nodes, found.node_rank) == ("sagemaker", nodes, node)
        assert found.master_host == "algo-1"


def test_sagemaker_file_of_a_spot_job_with_a_long_name(tmp_path):
    text = _example(("# spot_wait_hours", "spot_wait_hours"), ("hours = 24", "# hours = 24"))
    run_name = f"{'n' * 64}-20261130-120000-abcdef"
    job = json.loads(templates.render("sagemaker", _config(tmp_path, text, "sagemaker"), run_name))
    assert job["EnableManagedSpotTraining"] is True
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 172800}
    assert len(job["TrainingJobName"]) == 63 and job["TrainingJobName"].endswith("-20261130-120000-abcdef")


def _read_calls(text: str) -> dict[str, dict[str, ast.expr]]:
    """Return the keyword arguments of each function that the Python file calls."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    found: dict[str, dict[str, ast.expr]] = {}
    for call in calls:
        name = ast.unparse(call.func)
        found[name] = {word.arg or "": word.value for word in call.keywords}
    return found


def test_sagemaker_sdk_file(layout):
    """tests/real/test_sagemaker.py runs it with the SDK."""
    nodes, _, load = layout
    calls = _read_calls(templates.render("sagemaker-sdk", load("sagemaker-sdk"), "my_run-1"))
    source = calls["SourceCode"]
    assert ast.literal_eval(source["command"]) == f"exec python {JOB}"
    assert "--train_url=/opt/ml/checkpoints" in ast.literal_eval(source["args"])
    assert ast.literal_eval(calls["Compute"]["instance_count"]) == nodes
    assert ast.literal_eval(calls["CheckpointConfig"]["s3_uri"]) == "s3://bucket/runs/my_run-1"
    assert ast.literal_eval(calls["InputData"]["data_source"]) == "s3://bucket/data/cifar10/"
    assert ast.unparse(calls["StoppingCondition"]["max_runtime_in_seconds"]) == "86400"
    assert {"max_wait_time_in_seconds"}.isdisjoint(calls["StoppingCondition"]) and "Torchrun" not in calls


def test_sagemaker_sdk_file_with_torchrun_and_spot(tmp_path):
    text = _example(("# spot_wait_hours", "spot_wait_hours"), ("# torchrun", "torchrun"))
    config = _config(tmp_path, text, "sagemaker-sdk")
    calls = _read_calls(templates.render("sagemaker-sdk", config, "run-1"))
    assert ast.unparse(calls["Torchrun"]["process_count_per_node"]) == "8"
    assert ast.literal_eval(calls["SourceCode"]["entry_script"]) == JOB
    assert ast.literal_eval(calls["ModelTrainer"]["hyperparameters"])["train_url"] == "/opt/ml/checkpoints"
    assert ast.unparse(calls["Compute"]["enable_managed_spot_training"]) == "True"
    assert ast.unparse(calls["StoppingCondition"]["max_wait_time_in_seconds"]) == "172800"
    config = _config(tmp_path, text.replace('dataset = "cifar10"', 'dataset = "it\'s"'), "sagemaker-sdk")
    with pytest.raises(BadInput, match=r"\[parameters\] dataset: expected a value without '"):
        templates.render("sagemaker-sdk", config, "run-1")


def test_slurm_file(layout, tmp_path):
    """bash runs the file with a substitute of srun, which prints its arguments."""
    nodes, gpus, load = layout
    script = tmp_path / "job.sh"
    script.write_text(templates.render("slurm", load("slurm"), "run-1"))
    subprocess.run(["bash", "-n", script], check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", script.read_text(), re.MULTILINE))
    assert int(options["nodes"]) == nodes and int(options["ntasks-per-node"]) == max(gpus, 1)
    assert options.get("gpus-per-node") == (str(gpus) if gpus else None)
    assert options["time"] == "24:00:00" and options["output"] == "/shared/logs/%x-%j.log"
    srun = tmp_path / "srun"
    write_program(
        srun,
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)\n"
        "print(os.environ.get('ERROR', ''), file=sys.stderr)\nsys.exit(int(os.environ['CODE']))\n",
    )
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "scontrol").chmod(0o755)
    kept = environment(SLURM_JOB_ID="7")
    kept["PATH"] = f"{tmp_path}:{kept['PATH']}"
    stopped = "srun: error: n1: tasks 0-6: Terminated\nsrun: error: n2: task 7: Exited with exit code 143"
    lost = "srun: error: n1: task 0: Exited with exit code 4\n" + stopped  # srun ended the others
    for code, restarts, error, requeued in (
        ("143", "", stopped, "7"),
        ("138", "", stopped.replace("143", "138"), "7"),
        ("152", "2", stopped.replace("143", "152"), "7"),
        ("143", "3", stopped, ""),
        ("143", "", lost, ""),
        ("2", "0", "", ""),
    ):
        changes = {"CODE": code, "SLURM_RESTART_COUNT": restarts, "ERROR": error}
        result = subprocess.run(["bash", script], env=kept | changes, capture_output=True, text=True)
        assert result.returncode == int(code) and result.stderr == f"{error}\n"
        assert "".join(re.findall(r"^requeue (.*)\n", result.stdout, re.M)) == requeued
    array = {"CODE": "143", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    shown = subprocess.run(["bash", script], env=kept | array, capture_output=True, text=True).stdout
    assert shown.endswith("requeue 7_1\n") and "--train_url=/shared/runs/run-1/1" in shown
    assert int(options["signal"].removeprefix("TERM@")) > 25 + 60, "--grace, and Slurm's resolution"
    words, env = json.loads(subprocess.check_output(["bash", script], env=kept | {"CODE": "0"}, text=True))
    assert words[:2] == ["--kill-on-bad-exit=1", "--distribution=block"]
    command = words[words.index("/shared/env/bin/python") + 1 :]
    assert command[0] == f"/shared/code/train_ddp-0123456789ab/{JOB}"
    assert "--train_url=/shared/runs/run-1" in command and "--data_url=/shared/data/cifar10" in command
    assert (env["PYTHONUNBUFFERED"], env["OMP_NUM_THREADS"], env["SRUN_CPUS_PER_TASK"]) == ("1", "8", "8")
    _check_layout("slurm", nodes, gpus, env, command)


def test_skypilot_file(layout):
    nodes, gpus, load = layout
    task = yaml.safe_load(templates.render("skypilot", load("skypilot"), "My_run-1"))
    assert task["name"] == "my-run-1" and task["num_nodes"] == nodes and task["resources"]["use_spot"] is True
    assert task["resources"].get("accelerators") == (f"H100:{gpus}" if gpus else None)
    recovery = {"max_restarts_on_errors": 3, "recover_on_exit_codes": [5, 143]}
    assert task["resources"]["job_recovery"] == recovery
    assert task["workdir"] == "packed/train_ddp-0123456789ab"
    assert task["file_mounts"] == {"/data": {"source": "s3://bucket/data", "mode": "MOUNT"}}
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    words = shlex.split(task["run"])
    assert words[:5] == ["timeout", "--kill-after=60", "24h", "python", JOB]
    assert {"--data_url=/data/cifar10", "--train_url=s3://bucket/runs/My_run-1"} < {*words}
    assert task["envs"]["PYTHONUNBUFFERED"] == "1"
    if gpus:
        counted = f"--processes_per_node={gpus}"  # the default of a job on such a machine
        _check_layout("skypilot", nodes, gpus, task["envs"], [*words, counted])


@pytest.mark.parametrize(("platform", "old", "new", "message"), [
    ("pai-dlc", 'workspace_id = "12345"', "", "[platform.pai-dlc] 'workspace_id' is undefined"),
    ("sagemaker", 'code = "s3://', 'code = "obs://', "sagemaker reads s3:// only: obs://bucket/code"),
    ("sagemaker-sdk", 'role_arn = "arn', '# "arn', "[platform.sagemaker] 'role_arn' is undefined"),
    ("sagemaker", "data_url = ", "code = ", "[inputs] code: sagemaker has a channel of this name"),
    ("sagemaker-sdk", "faults = 3", "faults = 31", "sagemaker retries a job at most 30 times"),
    ("sagemaker", "# spot_wait_hours = 24", 'spot_wait_hours = "24"', "spot_wait_hours: expected a whole"),
    ("sagemaker-sdk", "# torchrun = true", 'torchrun = "no"', "torchrun: expected true or false, got 'no'"),
    (
        "skypilot",
        'inputs = { data_url = "/data/cifar10" }\noutputs = { train_url = "s3://bucket/runs" }',
        'outputs = { train_url = "/runs" }',
        "[outputs] train_url: /runs/run-1 would be lost with its pod or machine",
    ),
    ("pai-dlc", '{ train_url = "/mnt/runs" }', '{ train_url = "/mnt/run" }', "would be lost with its pod or"),
    ("slurm", "[platform.slurm]", "[platform.slurm]\nunused = 1", "unused: unknown key: expected one"),
    ("slurm", '{ data_url = "/shared', '{ data-url = "/shared', "data_url is given twice in [inputs]"),
])  # fmt: skip
def test_what_a_template_does_not_accept(platform, old, new, message, tmp_path):
    with pytest.raises(BadInput, match=re.escape(message)):
        templates.render(platform, _config(tmp_path, _example((old, new)), platform), "run-1")


# the manifests of Kubernetes are tested in test_kubernetes.py
@pytest.mark.parametrize("platform", sorted(templates.COMMANDS.keys() - {"kubernetes", *KUBEFLOW}))
def test_values_that_shells_and_yaml_would_take_apart(platform, tmp_path):
    words = """it's "a" $(date) `x` #1 : {b} [c] \\ 训练 yes"""
    text = _example(
        ('dataset = "cifar10"', f"dataset = '''{words}'''"), ('OMP_NUM_THREADS = "8"', "A = \"no: '#' 1\"")
    )
    made = templates.render(platform, _config(tmp_path, text, platform), "run-1")
    if platform == "slurm":
        (line,) = re.findall(r"^srun .*$", made, re.MULTILINE)
        assert f"--dataset={words}" in shlex.split(line)
        assert "A=no: '#' 1" in shlex.split(" ".join(re.findall(r"^export .*$", made, re.MULTILINE)))
        subprocess.run(["bash", "-n"], input=made, text=True, check=True)
    elif platform == "skypilot":
        task = yaml.safe_load(made)
        assert f"--dataset={words}" in shlex.split(task["run"]) and task["envs"]["A"] == "no: '#' 1"
    elif platform == "pai-dlc":
        assert f"--dataset={words}" in shlex.split(json.loads(made)["UserCommand"])
    elif platform == "sagemaker-sdk":
        assert f"--dataset={words}" in ast.literal_eval(_read_calls(made)["SourceCode"]["args"])
    else:
        assert f"--dataset={words}" in json.loads(made)["AlgorithmSpecification"]["ContainerArguments"]
