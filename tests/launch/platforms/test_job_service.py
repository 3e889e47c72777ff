"""`submit`, `status`, `logs` and `stop` work with the vendor's SDK and a local substitute of the service."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from bootfile.ground.errors import BadInput
from common.ground import endings
from launch import records as job_records
from launch.platforms import config as job_config
from launch.platforms import logs as job_logs
from launch.platforms import request as job_request
from launch.platforms import service as modelarts
from launch.platforms.logs import lines_after
from launch.platforms.service import Preview
from tests.conftest import environment, finish, start
from tests.support.modelarts_service import PROJECT, SECRET_KEY, ModelArtsService
from tests.support.terminal import Terminal

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
    """A user with job.toml, keys and a folder for records; earlier faults of the service are cleared."""
    server.test(clear=True)
    (tmp_path / "job.toml").write_text(CONFIG.format(endpoint=server.endpoint))
    monkeypatch.setattr(job_records, "FOLDER", str(tmp_path / "records"))
    for name in ("MODELARTS_ENDPOINT", "MODELARTS_REGION", "HUAWEICLOUD_SDK_SECURITY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.keys().items():
        monkeypatch.setenv(name, value)
    return User(server, tmp_path, capsys)


class User:
    """launch() runs `python -m launch` in this process, which has imported the SDK; start() in a new one."""

    def __init__(self, server, folder, capsys):
        self.server, self.folder, self.config, self._capsys = server, folder, folder / "job.toml", capsys
        self.environment = environment(**server.keys(BOOTFILE_JOBS=str(folder / "records")))

    def start(self, *arguments, **options):
        return start("-m", "launch", *arguments, env=self.environment, **options)

    def launch(self, verb, *arguments, code=0):
        self._capsys.readouterr()
        try:
            found = importlib.import_module(f"launch.platforms.{verb}").main([*map(str, arguments)])
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

    def job(self, **changes) -> str:
        """Return the id of an existing job with a record. changes: of its state, as in Service.test."""
        config = job_config.load(str(self.config), "jobs/train_ddp.py")
        run = job_request.make_run_name(config.name)
        outputs = job_request.make_outputs(config.outputs, run)
        job_id = list(self.server.test(new=job_request.make_body(config, outputs))["bodies"])[-1]
        record = {"id": job_id, "name": "ddp", "endpoint": self.server.endpoint, "project_id": PROJECT}
        job_records.write(str(self.folder / "records" / f"{run}.json"), record | {"outputs": outputs})
        self.server.test(job=job_id, **changes)
        return job_id

    def records(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / "records").glob("*.json"))]


def test_from_submit_to_the_end(user, server):
    """Each command, in its own process, shows the state of the job up to its end."""
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
    (path,) = (user.folder / "records").iterdir()
    assert not os.stat(path).st_mode & 0o077 and not re.search("KEY|TESTING", path.read_text())

    shown = user.launch("status", record["run"]).stdout
    assert re.match(rf"job {job_id} ddp: Creating, created \S+ \S+ UTC, nodes=2\n", shown)
    running = {"phase": "Running", "log": {"worker-0": "epoch=1 loss=0.5\n", "worker-1": "hello\n"}}
    later = {"log": {"worker-0": "epoch=2 loss=0.25\nlast line without an end", "worker-1": "训练 bye\n"}}
    end = {"phase": "Completed", "status": {"task_statuses": [{"task": "worker-0", "exit_code": 0}]}}
    server.test(job=job_id, script=[(0.3, {"phase": "Pending"}), (0.6, running), (1.2, later), (1.8, end)])
    logs = finish(user.start("logs", job_id, "-f", "--interval=0.1"))
    of = {node: re.findall(rf"^\[{node}\] (.*)$", logs.stdout, re.MULTILINE) for node in (0, 1)}
    assert of == {
        0: ["epoch=1 loss=0.5", "epoch=2 loss=0.25", "last line without an end"],
        1: ["hello", "训练 bye"],
    }
    assert logs.stderr == "job Completed\n"

    first, task, *events, _ = user.launch("status", job_id).stdout.splitlines()
    assert first.startswith(f"job {job_id} ddp: Completed, created ") and first.endswith(" nodes=2")
    assert task == "task worker-0 exit_code=0: done"
    phases = ("Creating", "Pending", "Running", "Completed")
    assert [event.rpartition(" the job is ")[2] for event in events] == [*phases]


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
    monkeypatch.setattr(job_records, "FOLDER", str(user.folder / "file" / "records"))
    assert "cannot be written: Not a directory" in user.refused(), "what cannot be recorded is not sent"
    assert len(server.test()["bodies"]) == before + 1


def test_a_run_is_resumed_when_its_job_has_ended(user, server):
    job_id = user.created()
    (record,) = user.records()
    url = record["outputs"]["train_url"]
    for phase in ("Running", "Abnormal"):  # an abnormal job may still write
        server.test(job=job_id, phase=phase)
        assert f"job {job_id} is {phase} and writes there" in user.refused("--resume_from", url)
    assert user.launch("logs", job_id, "-f", "--interval=0.05", code=1).stderr == "job Abnormal\n"
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
    assert "no key of the account: set the variables HUAWEICLOUD_SDK_AK and HUAWEICLOUD" in user.refused()
    assert user.records() == []


def test_too_many_requests_and_faults_of_the_service_pass(user, server):
    server.test(fault={"status": 429, "times": 2, "path": "training-jobs"})  # refused, so it is sent again
    job_id = user.created()
    for kind in (429, 500, "reset"):
        server.test(fault={"status": kind, "path": job_id})
        assert ": Creating" in user.launch("status", job_id).stdout
    for kind in (500, "text"):
        server.test(fault={"status": kind, "times": 99, "path": job_id})
        assert "show training job details: " in user.fails("status", job_id)
        server.test(clear=True)


@pytest.mark.parametrize("kind", ["reset", "reset_after", 500])
def test_a_job_is_never_created_twice(user, server, kind):
    before = len(server.test()["bodies"])
    server.test(fault={"status": kind, "times": 1, "path": "training-jobs"})
    error = user.refused()
    assert "whether it was created is not known: look for ddp in the console" in error
    assert len(server.test()["bodies"]) == before + (kind == "reset_after")
    (record,) = user.records()
    assert record["id"] is None
    assert "it is not known whether job ddp was created" in user.fails("status", record["run"])


def test_a_service_that_is_not_there(user, server, tmp_path):
    user.job()
    (path,) = (tmp_path / "records").glob("*.json")
    path.write_text(path.read_text().replace(server.endpoint, "http://127.0.0.1:9"))
    error = finish(user.start("status", path), code=2).stderr  # in a new process the SDK logs as for a user
    known = r"error: show training job details: no usable answer from 127.0.0.1:9 \(Conn[^\n]+\n"
    assert re.fullmatch(known, error), error


def test_a_bare_id_is_looked_for_by_the_environment(user, server, monkeypatch):
    job_id = user.job()
    monkeypatch.setattr(job_records, "FOLDER", str(user.folder / "elsewhere"))
    monkeypatch.setenv("MODELARTS_ENDPOINT", server.endpoint)
    assert f"job {job_id} ddp: Creating" in user.launch("status", job_id).stdout
    assert "no such file, and not the id of a job" in user.fails("status", "../job.json")
    assert "ModelArts.2764 training job 0-0 does not exist" in user.fails("status", "0-0")
    monkeypatch.delenv("MODELARTS_ENDPOINT")
    error = user.fails("status", job_id)
    assert "no region" in error and "MODELARTS_REGION" in error
    monkeypatch.setenv("MODELARTS_ENDPOINT", "http://192.0.2.1")
    assert "is not encrypted" in user.fails("status", job_id)
    monkeypatch.delenv("HUAWEICLOUD_SDK_PROJECT_ID")
    monkeypatch.setenv("MODELARTS_ENDPOINT", server.endpoint)
    assert "or HUAWEICLOUD_SDK_PROJECT_ID" in user.fails("status", job_id)


def test_exit_codes_and_restarts_are_explained(user, server):
    """Text of the service does not control the terminal."""
    job_id = user.job()
    tasks = [
        {"task": "worker-10", "exit_code": 139},
        {"task": "worker-1", "exit_code": 137, "message": "OOM\nKilled\x1b[2J"},
        {"task": "worker-0"},
    ]
    fault = {"end_at": 1700000000, "end_reason": "NodeFault", "end_related_task": "worker-1"}
    records = [{"start_at": 1, "end_recover": "pod_reschedule", **fault}, {"start_at": 1700000100}]
    server.test(job=job_id, phase="Running", log={"worker-0": "\x1b]0;x\x07a\tb\n"})
    server.test(job=job_id, phase="Failed", status={"task_statuses": tasks, "running_records": records})
    lines = user.launch("status", job_id).stdout.splitlines()
    assert lines[1:4] == [
        "task worker-1 exit_code=137: SIGKILL: killed, or out of memory; OOM Killed\\x1b[2J",
        "task worker-10 exit_code=139: SIGSEGV: segmentation fault",
        "restart 2023-11-14 22:13:20 UTC pod_reschedule: NodeFault (worker-1)",
    ]
    assert [line.split(" ")[0] for line in lines[4:]] == ["event"] * 3 + ["output"]
    assert lines[6].endswith("is Failed")
    result = user.launch("logs", job_id, "-f", "--interval=0.05", code=1)
    assert result.stdout == "[0] \\x1b]0;x\\x07a b\n"
    assert "task worker-1 exit_code=137: SIGKILL" in result.stderr and result.stderr.endswith("job Failed\n")


def test_an_interrupted_command_leaves_the_job_running(user, server):
    job_id = user.job(phase="Running", log={"worker-0": "一\n二\nhalf", "worker-1": "x\n"})
    process = user.start("logs", job_id, "-f", "--interval=0.05")
    lines = [process.stdout.readline() for _ in range(3)]
    assert sorted(lines) == ["[0] 一\n", "[0] 二\n", "[1] x\n"]
    process.send_signal(signal.SIGINT)
    assert "interrupted" in finish(process, code=130).stderr
    server.test(job=job_id, log={"worker-0": " and half\n三\n"}, phase="Completed")
    everything = "[0] 一\n[0] 二\n[0] half and half\n[0] 三\n[1] x\n"
    for options in ((), ("-f", "--interval=0.05")):
        assert user.launch("logs", job_id, *options).stdout == everything


def test_a_node_that_has_not_written_yet_is_waited_for(user, server):
    status = {"tasks": ["worker-0", "worker-1"]}
    job_id = user.job(phase="Pending", status=status, log={"worker-1": "b\n"})
    assert user.launch("logs", job_id).stdout == "[1] b\n"
    end = {"phase": "Completed", "log": {"worker-0": "a\n"}}
    server.test(job=job_id, script=[(0.3, end)])
    assert user.launch("logs", job_id, "-f", "--interval=0.05").stdout == "[1] b\n[0] a\n"


def test_following_outlives_faults_of_the_service(user, server, monkeypatch):
    job_id = user.job(phase="Running", log={"worker-0": "first\n"})
    process = user.start("logs", job_id, "-f", "--interval=0.05")
    assert process.stdout.readline() == "[0] first\n"
    for kind, times in (("reset", 12), (500, 1), (429, 1)):  # more than the SDK repeats
        server.test(fault={"status": kind, "times": times, "path": job_id})
    server.test(job=job_id, log={"worker-0": "second\n"})
    assert process.stdout.readline() == "[0] second\n"
    server.test(job=job_id, phase="Completed")
    result = finish(process, code=0)
    assert "; trying again" in result.stderr and result.stdout == ""
    server.test(fault={"status": 403, "times": 1, "path": job_id})
    assert "HTTP 403" in user.fails("logs", job_id, "-f")
    server.test(fault={"status": 500, "times": 1000, "path": job_id})
    monkeypatch.setattr(job_logs, "_GIVE_UP", 0.1)
    began = time.monotonic()
    errors = user.launch("logs", job_id, "-f", "--interval=0.05", code=2).stderr
    assert time.monotonic() - began < 20 and "error: show training job details" in errors


def test_missing_bytes_are_counted_and_a_new_log_is_read_from_its_beginning():
    _, place = lines_after(0, Preview("old 1\nold 2\n", 12, 12))
    assert lines_after(place, Preview("new\n", 4, 4)) == (["[the log starts again]", "new"], 4)
    log = "".join(f"第{n}行\n" for n in range(100)).encode()
    window = log[-64:].decode(errors="ignore").encode()
    lines, place = lines_after(6, Preview(window.decode(), len(window), len(log)))
    missing = int(re.fullmatch(r"\[(\d+) bytes are missing here: .*\]", lines[0])[1])
    shown = "".join(f"{line}\n" for line in lines[1:]).encode()
    assert log.endswith(shown) and 6 + missing + len(shown) == place == len(log)


def _windows(log: bytes, sizes, step: int):
    """Yield the windows of a growing log that the service would show."""
    for end, size in zip(range(step, len(log) + step, step), sizes * len(log), strict=False):
        window = log[:end][-size:]
        text = window.decode(errors="surrogateescape")
        text = re.sub("[\udc80-\udcff]", "\N{REPLACEMENT CHARACTER}", text)
        yield Preview(text, len(window), len(log[:end]))


@pytest.mark.parametrize(("step", "sizes"), [(1, [100]), (7, [200, 100, 120]), (64, [10_000])])
def test_no_line_is_lost_or_doubled_or_broken(step, sizes):
    """Windows may cut anywhere: in characters of 1 to 4 bytes, empty lines and repeated lines."""
    lines = [f"line {number} é 漢字 \N{GRINNING FACE}" if number % 3 else "same" for number in range(60)]
    lines[20:23] = ["", "", "same"]
    log = "".join(f"{line}\n" for line in lines).encode() + "no end 漢".encode()
    seen, place = [], 0
    for preview in _windows(log, sizes, step):
        new, place = lines_after(place, preview)
        seen += new
    new, place = lines_after(place, preview, last=True)
    assert seen + new == [*lines, "no end 漢"]
    assert place == len(log)
    assert lines_after(place, preview, last=True) == ([], place)


def test_stop_asks_and_says_what_is_stopped(user, server, monkeypatch):
    job_id = user.job(phase="Running")
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    shown = user.launch("stop", job_id, code=1).stdout
    assert re.match(rf"job {job_id} ddp: Running, created .+ UTC, nodes=2\n", shown)
    assert shown.endswith("[y/N] not stopped\n")
    assert ["POST", f"/v2/{PROJECT}/training-jobs/{job_id}/actions"] not in server.test()["requests"]
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    assert user.launch("stop", job_id).stdout.endswith(f"job {job_id}: Terminating\n")
    assert user.launch("stop", job_id).stdout.endswith("nothing to do: it is being stopped\n")
    result = user.launch("logs", job_id, "-f", "--interval=0.1", code=1)
    assert result.stderr == "job Terminated\n"
    assert "nothing to stop: it has ended" in user.launch("stop", job_id, "--yes").stdout


def test_a_reader_that_leaves_is_no_error(user, server):
    job_id = user.job(phase="Running", log={"worker-0": "first\n" + "x\n" * 200_000})
    process = user.start("logs", job_id, "-f", "--interval=0.05", fresh=True)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == ""


@pytest.mark.parametrize("wrong", ['{"id": "../x"}', '{"outputs": ["obs://bucket/x"]}', "[" * 100_000, "{"])
def test_a_damaged_record_is_one_line_and_disturbs_no_other(user, server, wrong):
    good, record = (
        user.job(),
        {"format": 1, "id": "other-1", "endpoint": server.endpoint, "project_id": PROJECT},
    )
    if wrong.endswith("}"):
        wrong = json.dumps(record | json.loads(wrong))
    (user.folder / "records" / "a.json").write_text(wrong)
    for verb in ("status", "logs", "stop"):
        assert "is not a record of a job" in user.fails(verb, "a")
    assert f"job {good} ddp" in user.launch("status", good).stdout


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
