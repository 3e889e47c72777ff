"""What `submit` writes for Kubernetes is what its published schemas accept, and what `simulate` starts.

The files in schemas/ are unchanged, from others (Apache License 2.0), and compressed with `xz -9e`:

kubernetes-1.37.0: v1.37.0-local-strict/_definitions.json of the package kubernetes-validate 1.37.0 (PyPI),
    made of Kubernetes' published OpenAPI
trainjobs-2.3.0, pytorchjobs-1.9.4: manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml of the tag v2.3.0,
    and kubeflow.org_pytorchjobs.yaml of v1.9.4, of github.com/kubeflow/trainer
"""

import argparse
import functools
import json
import lzma
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from bootfile.ground.errors import BadInput
from bootfile.ground.exit_codes import RESTARTED
from common.platform.place import resolve
from launch.platforms import config as job_config
from launch.platforms import templates
from launch.profiles import Folders, make_starts
from tests.conftest import ROOT, environment
from tests.support.simulated import simulate

EXAMPLE = ROOT / "launch" / "job.example.toml"
JOB = "jobs/train_ddp.py"
PLATFORMS = ("kubernetes", "kubeflow", "kubeflow-v1")
SCHEMAS = Path(__file__).parent / "schemas"
SAY_ALL = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("PET_", "JOB_", "MASTER_", "RANK", "WORLD_"))]
print("got", json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]), flush=True)
"""


def make(platform, tmp_path, *replacements, run="My_run-1"):
    """Return the manifests that `submit` writes for the example with these replacements."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    config = job_config.load(str(path), JOB, platform)
    return [*yaml.safe_load_all(templates.render(platform, config, run))]


def read_schema(name):
    text = lzma.decompress((SCHEMAS / f"{name}.xz").read_bytes())
    return json.loads(text) if name.endswith("json") else yaml.safe_load(text)


@functools.cache
def find_validator(kind):
    """Return the validator of a kind. An unknown field is an error: the server would drop it."""
    if kind in ("Job", "Service"):
        schema = read_schema("kubernetes-1.37.0.json")
        group = "batch" if kind == "Job" else "core"
        return jsonschema.Draft202012Validator(schema | {"$ref": f"#/$defs/io.k8s.api.{group}.v1.{kind}"})
    name = {"TrainJob": "trainjobs-2.3.0.yaml", "PyTorchJob": "pytorchjobs-1.9.4.yaml"}[kind]
    (version,) = [each for each in read_schema(name)["spec"]["versions"] if each["storage"]]
    schema = version["schema"]["openAPIV3Schema"]
    close(schema)
    schema["properties"]["apiVersion"]["enum"] = [f"{read_schema(name)['spec']['group']}/{version['name']}"]
    return jsonschema.Draft202012Validator(schema)


def close(schema):
    """Forbid the properties that a schema does not name, in it and below it."""
    if isinstance(schema, list):
        for each in schema:
            close(each)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            schema.setdefault("additionalProperties", False)
        for each in schema.values():
            close(each)


def errors_of(manifest):
    return [error.message for error in find_validator(manifest["kind"]).iter_errors(manifest)]


def pod_of(manifest):
    """Return (spec of the pod, container) of a manifest. A TrainJob has them in parts."""
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        pod = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    elif manifest["kind"] == "TrainJob":
        (patch,) = spec["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = node["template"]["spec"]["template"]["spec"]
        assert node["name"] == "node" == pod["containers"][0]["name"], "those of the runtime"
        resources = spec["trainer"].get("resourcesPerNode", {})
        return pod, pod["containers"][0] | spec["trainer"] | {"resources": resources}
    else:
        pod = spec["template"]["spec"]
    return pod, pod["containers"][0]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("nodes", "gpus"), [(2, 8), (1, 1), (3, 0)])
def test_schemas(platform, nodes, gpus, tmp_path):
    manifests = make(
        platform, tmp_path, ("node_count = 2", f"node_count = {nodes}"),
        ("gpus_per_node = 8", f"gpus_per_node = {gpus}"),
    )  # fmt: skip
    *services, job = manifests
    assert [error for manifest in manifests for error in errors_of(manifest)] == []
    assert {manifest["metadata"]["name"] for manifest in manifests} == {"my-run-1"}
    spec = job["spec"]
    if platform == "kubernetes":
        assert [service["spec"]["clusterIP"] for service in services] == ["None"]
        assert (spec["completions"], spec["parallelism"]) == (nodes, nodes)
    elif platform == "kubeflow":
        assert spec["runtimeRef"] == {"name": "torch-distributed"}
        assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (nodes, gpus or 1)
    else:
        replicas = spec["pytorchReplicaSpecs"]
        assert sum(each["replicas"] for each in replicas.values()) == nodes
        assert replicas["Master"]["replicas"] == 1 and spec["nprocPerNode"] == str(gpus or 1)
    pod, container = pod_of(job)
    assert pod["terminationGracePeriodSeconds"] == 60
    assert container["command"] == ["python", f"/code/bootfile-0123456789ab/{JOB}"], "no shell"
    assert "--train_url=obs://bucket/runs/My_run-1" in container["args"]
    assert container.get("resources", {}).get("limits") == ({"nvidia.com/gpu": gpus} if gpus else None)
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "PYTHONUNBUFFERED", "value": "1"} in container["env"]


def expand(text):
    """Return an argument as a container gets it: "Double $$ are reduced to a single $" (the schema's text on
    `args`)."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda match: "$" if match[1] == "$" else "expanded", text)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_results_on_the_disk_of_a_pod_are_refused(platform, tmp_path):
    outside = ('train_url = "obs://bucket/runs"', 'train_url = "/codes/runs"')
    with pytest.raises(BadInput, match=r"/codes/runs/.* would be lost with its pod"):
        make(platform, tmp_path, outside)
    inside = ('train_url = "obs://bucket/runs"', 'train_url = "/code/runs"')
    if platform == "kubernetes":  # the example gives it the volume
        make(platform, tmp_path, inside)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_values_that_yaml_and_kubernetes_would_take_apart(platform, tmp_path):
    words = """it's "a" $(date) $$(A) $$ $ `x` #1 : {b} [c] \\ 训练 yes"""
    *_, job = make(
        platform, tmp_path, ('dataset = "cifar10"', f"dataset = '''{words}'''"),
        ('OMP_NUM_THREADS = "8"', "A = \"no: '#' 1\""),
    )  # fmt: skip
    _, container = pod_of(job)
    assert f"--dataset={words}" in [expand(word) for word in container["args"]]
    assert {"name": "A", "value": "no: '#' 1"} in container["env"]


UNIQUE = "-20261130-120000-0a1b2c"


@pytest.mark.parametrize("run", [f"3d_{60 * 'x'}{UNIQUE}", f"_-run{UNIQUE}", f"7{UNIQUE}", "a-1"])
def test_names_of_runs_are_names_in_a_cluster(run, tmp_path):
    """RFC 1035, as the rule in the schema of a TrainJob and a Service demand; pods append more to it."""
    rules = read_schema("trainjobs-2.3.0.yaml")["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    (pattern,) = re.findall(r"name\.matches\('(.+)'\)", str(rules["x-kubernetes-validations"]))
    for platform in PLATFORMS:
        for manifest in make(platform, tmp_path, run=run):
            name = manifest["metadata"]["name"]
            assert re.fullmatch(pattern, name) and len(f"{name}-worker-9999") <= 63
            assert name == "a-1" or name.endswith("0a1b2c"), "the part that is unique"


def test_what_restarts_a_job(tmp_path):
    """The policy is that of the guide. What only the server checks is checked here: see ValidateJob."""
    _, job = make("kubernetes", tmp_path, ("faults = 3", "faults = 5"))
    spec = job["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never" and spec["completionMode"] == "Indexed"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], spec.get("backoffLimit")) == (5, 0, None)
    assert spec["podReplacementPolicy"] == "Failed"
    evicted, refused = spec["podFailurePolicy"]["rules"]  # the first that fits counts
    assert evicted == {
        "action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }  # fmt: skip
    codes = refused["onExitCodes"]
    assert (refused["action"], codes["operator"], codes["containerName"]) == ("FailJob", "NotIn", "job")
    assert codes["values"] == sorted(set(RESTARTED)) and 0 not in codes["values"]
    assert {4, 5, 6, 143} < {*codes["values"]} and not {2, 7, 20, 130} & {*codes["values"]}
    line = re.search(r"requeue on (.*), and limit", (ROOT / "guides/trouble.md").read_text("utf-8"))[1]
    line = line.replace("`4` to `6`", "`4`, `5`, `6`")
    assert {*map(int, re.findall(r"\d+", line))} | {1} == {*RESTARTED}
    _, job = make("kubernetes", tmp_path, ("faults = 3", "# faults = 3"))
    assert job["spec"]["backoffLimitPerIndex"] == 0


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_pod_is_killed_after_the_grace_of_the_job(platform, tmp_path):
    *_, job = make(platform, tmp_path, ("epochs = 20", "grace = 90.5"))
    assert pod_of(job)[0]["terminationGracePeriodSeconds"] == 126
    for grace in ('"soon"', "0", "inf"):
        with pytest.raises(BadInput, match=r"--grace .* is not a number"):
            make(platform, tmp_path, ("epochs = 20", f"grace = {grace}"))


def variables_of(job, node):
    """Return the variables that a pod of an Indexed Job gets, with those that the controller adds."""
    values = {}
    for variable in pod_of(job)[1]["env"]:
        source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if source:
            assert source == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        values[variable["name"]] = str(node) if source else variable["value"]
    return values | {"JOB_COMPLETION_INDEX": str(node)}


def test_the_pods_find_each_other(tmp_path):
    service, job = make("kubernetes", tmp_path, ("gpus_per_node = 8", "gpus_per_node = 4"))
    spec = job["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    for node in range(2):
        place = resolve(argparse.Namespace(), variables_of(job, node))
        assert (place.source, place.node_rank, place.nodes) == ("kubernetes", node, 2)
        # the host name of a pod is JOB-INDEX
        assert place.master_host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_simulate_starts_what_the_manifest_says(tmp_path):
    """The same variables, and the same words of the command: no shell is between them."""
    (tmp_path / "mine").mkdir()
    script = tmp_path / "mine" / "job.py"
    script.write_text(SAY_ALL)
    parameters = '[parameters]\nname = "a b"\nlr = 0.1\n'
    (tmp_path / "job.toml").write_text(
        f'name = "run"\n{parameters}[resources]\nnode_count = 2\ngpus_per_node = 0\n'
        '[platform.kubernetes]\nimage = "image"\ncode_dir = "/code"\n'
    )
    config = job_config.load(str(tmp_path / "job.toml"), "job.py", "kubernetes")
    _, job = yaml.safe_load_all(templates.render("kubernetes", config, "run-1"))
    _, container = pod_of(job)
    assert container["command"] == ["python", "/code/job.py"]
    command = ("--nodes=2", "--platform=kubernetes", script, "--", *container["args"])
    result = simulate(*command, env=environment(JOB_COMPLETION_INDEX="7", PET_NNODES="9"))
    for node in range(2):
        words, started = json.loads(re.search(rf"\[node {node}\] got (.*)", result.stdout)[1])
        expected = variables_of(job, node)
        del expected["PYTHONUNBUFFERED"]
        assert words == container["args"] and started.keys() == expected.keys()
        for place in ("PET_MASTER_ADDR", "PET_MASTER_PORT"):  # those of this machine
            del started[place], expected[place]
        assert started == expected
    folders = Folders("/code", "/in", "/out", "/cache", "/log")
    (start,) = make_starts("kubernetes", 1, 2, 1, ["run-1-0.run-1", "x"], 29500, folders)
    assert start.environment | {"PYTHONUNBUFFERED": "1"} == variables_of(job, 1) and not start.arguments
