"""`submit` works with the vendor's SDK and a local substitute of the service."""

import json
import os
import re
import subprocess
import sys

import pytest

from bootfile.ground.errors import BadInput
from common.ground import endings
from launch import records as job_records
from launch.platforms import service as modelarts
from launch.platforms import submit as submit_verb
from launch.transfer import fetch as fetch_verb
from tests.conftest import environment, finish, names, start
from tests.support.modelarts_service import PROJECT, SECRET_KEY, ModelArtsService
from tests.support.terminal import Terminal

VERBS = {"submit": submit_verb, "fetch": fetch_verb}
CONFIG = """
name = "ddp"
code = "obs://bucket/code/bootfile-0123456789ab"
endpoint = "{endpoint}"
log_url = "obs://bucket/logs"

[image]
engine_name = "PyTorch"
engine_version = "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"

[resources]
flavor_id = "modelarts.pool.visual.8xlarge"
node_count = 2

[inputs]
data_url = "obs://bucket/data"

[outputs]
train_url = "obs://bucket/runs"

[parameters]
enable_gpu = true
"""


@pytest.fixture(scope="module")
def server():
    with ModelArtsService() as service:
        yield service


@pytest.fixture
def user(server, tmp_path, monkeypatch, capsys):
    """A user with job.toml, keys and a folder for records, whose name has the brackets of a pattern; earlier
    faults of the service are cleared."""
    server.test(clear=True)
    (tmp_path / "job.toml").write_text(CONFIG.format(endpoint=server.endpoint))
    monkeypatch.setattr(job_records, "FOLDER", str(tmp_path / "records[1]"))
    for name in ("MODELARTS_ENDPOINT", "MODELARTS_REGION", "HUAWEICLOUD_SDK_SECURITY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.keys().items():
        monkeypatch.setenv(name, value)
    return User(server, tmp_path, capsys)


class User:
    """launch() runs `python -m launch` in this process, which has imported the SDK; start() in a new one."""

    def __init__(self, server, folder, capsys):
        self.server, self.folder, self.config, self._capsys = server, folder, folder / "job.toml", capsys
        self.environment = environment(**server.keys(BOOTFILE_JOBS=str(folder / "records[1]")))

    def start(self, *arguments, **options):
        return start("-m", "launch", *arguments, env=self.environment, **options)

    def launch(self, verb, *arguments, code=0):
        self._capsys.readouterr()
        try:
            found = VERBS[verb].main([*map(str, arguments)])
        except BadInput as error:
            endings.say_error(str(error))
            found = error.code
        output, errors = self._capsys.readouterr()
        result = subprocess.CompletedProcess(arguments, found, output, errors)
        assert SECRET_KEY not in output + errors
        assert found == code, f"exit code {found}\n{output}\n{errors}"
        return result

    def fails(self, *arguments, **options) -> str:
        """Return the one line of an error."""
        errors = self.launch(*arguments, code=2, **options).stderr
        assert re.fullmatch(r"error: [^\n]+\n", errors), errors
        return errors

    def submit(self, *arguments, **options):
        return self.launch("submit", "jobs/train_ddp.py", "--config", self.config, *arguments, **options)

    def refused(self, *arguments) -> str:
        """Return the one line of an error of `submit --yes`."""
        return self.fails("submit", "jobs/train_ddp.py", "--config", self.config, "--yes", *arguments)

    def created(self) -> str:
        """Return a new job's id."""
        return re.search(r"^job (\S+)$", self.submit("--yes").stdout, re.MULTILINE)[1]

    def records(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / "records[1]").glob("*.json"))]


def test_submit_sends_what_it_shows_and_writes_a_record(user, server):
    dry = user.submit("--dry_run").stdout
    shown, _ = json.JSONDecoder().raw_decode(dry)
    created = finish(user.start("submit", "jobs/train_ddp.py", "--config", user.config, "--yes")).stdout
    job_id = re.search(r"^job (\S+)$", created, re.MULTILINE)[1]
    sent = server.test()["bodies"][job_id]
    (record,) = user.records()

    unique = re.compile(r"ddp-\d{8}-\d{6}-[0-9a-f]{6}")
    assert json.loads(unique.sub("RUN", json.dumps(sent))) == json.loads(unique.sub("RUN", json.dumps(shown)))
    url = f"obs://bucket/runs/{record['run']}"
    assert unique.fullmatch(record["run"]) and record["outputs"] == {"train_url": url}
    assert sent["algorithm"]["outputs"][0]["remote"]["obs"]["obs_url"] == f"/bucket/runs/{record['run']}/"
    assert sent["algorithm"]["environments"] == {"PYTHONUNBUFFERED": "1"}
    assert (record["id"], record["endpoint"], record["project_id"]) == (job_id, server.endpoint, PROJECT)
    assert (record["nodes"], record["job"]) == (2, "jobs/train_ddp.py")
    assert record["log_url"] == "obs://bucket/logs"
    assert f"/bucket/runs/{record['run']}/" in created and "modelarts.pool.visual.8xlarge" in created
    (path,) = (user.folder / "records[1]").iterdir()
    assert not os.stat(path).st_mode & 0o077 and not re.search("KEY|TESTING", path.read_text())


def test_nothing_is_sent_unless_somebody_agrees(user, server, monkeypatch):
    before = len(server.test()["bodies"])
    assert "pass --yes to create this job" in user.submit(code=2).stderr
    for answer in ("", "n\n", "maybe\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert user.submit(code=1).stdout.endswith("[y/N] nothing was sent\n")
    assert len(server.test()["bodies"]) == before and user.records() == []
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert re.search(r"\[y/N\] job \S+$", user.submit().stdout, re.MULTILINE)
    (user.folder / "file").touch()
    monkeypatch.setattr(job_records, "FOLDER", str(user.folder / "file" / "records[1]"))
    assert "cannot be written: Not a directory" in user.refused(), "what cannot be recorded is not sent"
    assert len(server.test()["bodies"]) == before + 1


def test_a_run_is_resumed_when_its_job_has_ended(user, server):
    job_id = user.created()
    (record,) = user.records()
    url = record["outputs"]["train_url"]
    for phase in ("Running", "Abnormal"):  # an abnormal job may still write
        server.test(job=job_id, phase=phase)
        assert f"job {job_id} is {phase} and writes there" in user.refused("--resume_from", url)
    server.test(job=job_id, phase="Failed")
    user.submit("--yes", "--resume_from", url)
    again = next(each for each in user.records() if each["id"] != job_id)
    assert again["outputs"] == {"train_url": url} and again["run"] != record["run"]
    (output,) = server.test()["bodies"][again["id"]]["algorithm"]["outputs"]
    assert output["prefetch_to_local"] is True and output["remote"]["obs"]["obs_url"] == f"/{url[6:]}/"


def test_a_refusal_is_one_line(user, server, monkeypatch):
    server.test(fault={"status": 404, "times": 1, "message": f"no, {SECRET_KEY}\nand no"})
    expected = "create training job: ModelArts.404 no, *** and no (HTTP 404, request id request-"
    assert expected in user.refused() and user.records() == []
    monkeypatch.setenv("HUAWEICLOUD_SDK_AK", "another-key")
    error = user.refused()
    assert "HTTP 401" in error and "aksk signature" in error and "another-key" not in error
    monkeypatch.setenv("HUAWEICLOUD_SDK_SK", "")
    assert names(user.refused(), "no key", "HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK")
    assert user.records() == []


@pytest.mark.thorough
def test_too_many_requests_and_faults_of_the_service_pass(user, server):
    server.test(fault={"status": 429, "times": 2, "path": "training-jobs"})  # refused, so it is sent again
    job_id = user.created()
    (record,) = user.records()
    url = record["outputs"]["train_url"]
    for kind in (429, 500, "reset"):
        server.test(fault={"status": kind, "path": job_id})
        assert names(user.refused("--resume_from", url), f"job {job_id}", "Creating", "writes there")
    for kind in (500, "text"):
        server.test(fault={"status": kind, "times": 99, "path": job_id})
        assert "show training job details: " in user.refused("--resume_from", url)
        server.test(clear=True)


@pytest.mark.parametrize("kind", ["reset", "reset_after", "no_id", 500])
def test_a_job_is_never_created_twice(user, server, kind):
    before = len(server.test()["bodies"])
    server.test(fault={"status": kind, "times": 1, "path": "training-jobs"})
    error = user.refused()
    assert re.search(r"created .*not known: .*\bddp\b", error)
    assert len(server.test()["bodies"]) == before + (kind in ("reset_after", "no_id"))
    (record,) = user.records()
    assert record["id"] is None
    error = user.fails("fetch", record["run"], "--to", user.folder / "results")
    assert names(error, "not known", "job ddp", "created")


def test_a_service_that_is_not_there(user, server):
    user.config.write_text(user.config.read_text().replace(server.endpoint, "http://127.0.0.1:9"))
    words = ("submit", "jobs/train_ddp.py", "--config", user.config, "--yes")
    error = finish(user.start(*words), code=2).stderr  # in a new process the SDK logs as for a user
    known = r"error: create training job: .*no .*answer .*127.0.0.1:9 \(Conn[^\n]+\n"
    assert re.fullmatch(known, error), error


def test_the_environment_names_the_service_and_the_project(user, server, monkeypatch):
    user.config.write_text(user.config.read_text().replace(f'endpoint = "{server.endpoint}"\n', ""))
    monkeypatch.setenv("MODELARTS_ENDPOINT", server.endpoint)
    user.created()
    monkeypatch.delenv("MODELARTS_ENDPOINT")
    error = user.refused()
    assert "no region" in error and "MODELARTS_REGION" in error
    monkeypatch.setenv("MODELARTS_ENDPOINT", "https://me:pw@host/v2")
    error = user.refused()
    assert "host/v2 is not https://HOST" in error and "no region" not in error and "pw" not in error
    for wrong in ("https://.", "https://a..b", "https://[:]", "https://host:0"):
        monkeypatch.setenv("MODELARTS_ENDPOINT", wrong)
        assert f"{wrong} is not https://HOST" in user.refused()
    monkeypatch.setenv("MODELARTS_ENDPOINT", "http://192.0.2.1")
    assert "is not encrypted" in user.refused()
    monkeypatch.delenv("HUAWEICLOUD_SDK_PROJECT_ID")
    monkeypatch.setenv("MODELARTS_ENDPOINT", server.endpoint)
    assert "or HUAWEICLOUD_SDK_PROJECT_ID" in user.refused()


@pytest.mark.parametrize("wrong", ['{"id": "../x"}', '{"outputs": ["obs://bucket/x"]}', "[" * 100_000, "{"])
def test_a_damaged_record_is_one_line_and_disturbs_no_other(user, server, wrong):
    job_id = user.created()
    (good,) = user.records()
    record = {"format": 1, "id": "other-1", "endpoint": server.endpoint, "project_id": PROJECT}
    if wrong.endswith("}"):
        wrong = json.dumps(record | json.loads(wrong))
    (user.folder / "records[1]" / "a.json").write_text(wrong)
    assert "not a record of a job" in user.fails("fetch", "a", "--to", user.folder / "results")
    refused = user.refused("--resume_from", good["outputs"]["train_url"])
    assert names(refused, f"job {job_id}", "Creating", "writes there")


def test_a_host_that_is_not_the_vendor_s_is_named_before_it_is_asked(user, monkeypatch, capsys):
    for place, expected in (
        ("https://modelarts.cn-north-4.myhuaweicloud.com", True),
        ("https://myhuaweicloud.com.example.com", False),
        ("https://modelarts.example.com", False),
        ("http://127.0.0.1:9", True),
    ):
        modelarts.ModelArts("", place, "p")
        assert (capsys.readouterr().err == "") == expected
    monkeypatch.setenv("MODELARTS_ENDPOINT", "https://modelarts.example.com/")
    modelarts.ModelArts("", "https://modelarts.example.com", "p")
    assert capsys.readouterr().err == ""
