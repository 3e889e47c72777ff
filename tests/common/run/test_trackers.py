"""--tracker reports to each package without a server or an account, the status of a TrainJob is sent as
Kubeflow's guide says, and a failure is one warning."""

import datetime
import functools
import http.server
import importlib.util
import json
import lzma
import queue
import re
import sqlite3
import ssl
import threading

import jsonschema
import pytest
import torch
import trustme
import yaml

from bootfile.ground.errors import BadInput
from common.run import trackers
from tests.conftest import ROOT, names
from tests.support.checkpointers import StubLoader, begin, log_of


def _report(folder, steps, first=0, tracker="mlflow"):
    """Report some steps of a run of 10, as a job with --tracker does."""
    log, loader = log_of(folder, tracker=tracker, lr=0.1, secret_key="hunter2"), StubLoader(10)
    loader.commit = lambda *_: None
    begin(log, loader, first, 10, "run-1")
    for loader.step in steps:
        sums = torch.tensor([loader.step, 1.0, 2.0], dtype=torch.float64)
        log.report(sums.clone(), None)
    log.validation(sums)
    log.finish()


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_a_restart_continues_the_run_at_mlflow(store, tmp_path, monkeypatch, capsys):
    if store == "sqlite":
        pytest.importorskip("sqlalchemy", reason="MLflow's sqlite needs sqlalchemy and alembic")
        pytest.importorskip("alembic", reason="MLflow's sqlite needs sqlalchemy and alembic")
    store = f"{store}:{'///' * (store == 'sqlite')}{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    import mlflow  # seconds, which other tests need not wait

    mlflow.set_tracking_uri(None)
    _report(tmp_path / "out", (1, 2), 0)
    _report(tmp_path / "out", (3,), 2)
    assert "are incomplete" not in capsys.readouterr().out
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.run_name == "out" and run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.1" and "hunter2" not in str(run.data)
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
    assert history == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert run.data.metrics["val_acc"] == 0.5


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_a_restart_continues_the_run_offline(name, tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for variable, value in {
        "WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "WANDB_SILENT": "true", "WANDB_PROJECT": "digits",
        "WANDB_ERROR_REPORTING": "false", "HF_HUB_OFFLINE": "1",
        "SWANLAB_MODE": "offline", "SWANLAB_LOG_DIR": tmp_path / "swanlog", "SWANLAB_PROJ_NAME": "digits",
        "TRACKIO_DIR": tmp_path / "trackio", "TRACKIO_PROJECT": "digits",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, str(value))
    monkeypatch.chdir(tmp_path)
    _report(tmp_path / "out", (1, 2), 0, name)
    _report(tmp_path / "out", (3,), 2, name)
    printed = capsys.readouterr().out
    assert "are incomplete" not in printed and "step=3" in printed
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "out" not in path.parts]
    assert any(b"val_acc" in path.read_bytes() for path in written)
    assert not any(b"hunter2" in path.read_bytes() for path in written)
    if name == "trackio":
        (database,) = [path for path in written if path.suffix == ".db"]
        query = "select distinct run_id, step, json_extract(metrics, '$.loss') from metrics where step < 4"
        rows = sorted(row for row in sqlite3.connect(database).execute(query) if row[2] is not None)
        assert [row[1:] for row in rows] == [(1, 0.5), (2, 1.0), (3, 1.5)]
        assert len({row[0] for row in rows}) == 1, "one run"
    else:  # each start writes a file, and `wandb sync` joins those of one id
        starts = [path.stem.replace("_", "-") for path in written if path.suffix == f".{name}"]
        assert starts == ["run-run-1"] * 2


def test_a_tracker_that_fails_is_one_warning_that_names_it(tmp_path, monkeypatch, capsys):
    class Broken:
        """A tracker whose errors differ, as those of a network do."""

        def __init__(self, *_):
            self.count = 0

        def log(self, figures, step):
            self.count += 1
            raise OSError(f"no answer\nto request {self.count}")

        finish = functools.partialmethod(log, {}, 0)

    monkeypatch.setattr(trackers, "WandbLike", Broken)
    _report(tmp_path / "out", (1, 2), 0, "wandb")
    printed = capsys.readouterr().out
    (warning,) = [line for line in printed.splitlines() if "warning" in line]
    assert names(warning, "--tracker wandb", "incomplete", "request 1")
    assert "step=2" in printed


def test_a_tracker_that_cannot_be_reached_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    import mlflow

    mlflow.set_tracking_uri(None)
    _report(tmp_path / "out", (1, 2), 0)
    printed = capsys.readouterr().out
    assert printed.count("are incomplete") == 1 == printed.count("--tracker mlflow") and "step=2" in printed


def test_a_package_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"--tracker wandb .*pip install wandb"):
        trackers.check("wandb")


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Return the queue of (authorization, body) that the status address of a TrainJob has taken."""
    monkeypatch.setattr(trackers, "_INTERVAL", 0.0)
    monkeypatch.setattr(trackers, "_TIMEOUT", 60.0)  # a slow machine
    taken = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            taken.put((self.headers["Authorization"], body))
            self.send_response(200 if self.path.endswith("/trainjobs/digits/status") else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        log_message = functools.partialmethod(print)

    authority, server = trustme.CA(), http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("hunter2\n")
    url = f"https://127.0.0.1:{server.server_port}/namespaces/default/trainjobs/digits/status"
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
    yield taken
    server.shutdown()
    thread.join()
    server.server_close()


def _taken(trainer):
    """Return the statuses that the server has taken, each as the resource of a TrainJob accepts it."""
    path = ROOT / "tests/launch/platforms/schemas/trainjobs-2.3.0.yaml.xz"
    (version,) = yaml.safe_load(lzma.decompress(path.read_bytes()))["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["trainerStatus"]
    bodies = []
    while not trainer.empty():
        authorization, body = trainer.get()
        assert authorization == "Bearer hunter2" and body.keys() == {"trainerStatus"}
        jsonschema.validate(body["trainerStatus"], schema | {"additionalProperties": False})
        bodies.append(body["trainerStatus"])
    return bodies


def test_the_status_of_a_trainjob(trainer, tmp_path, capsys):
    _report(tmp_path / "out", (2, 5, 10), tracker=None)
    bodies = _taken(trainer)
    assert bodies[0]["progressPercentage"] == 20 and bodies[0]["estimatedRemainingSeconds"] >= 0
    assert bodies[-1]["progressPercentage"] == 100 and bodies[-1]["estimatedRemainingSeconds"] == 0
    figures = {each["name"]: each["value"] for each in bodies[-1]["metrics"]}
    assert figures["loss"] == "5" and figures["lr"] == "0.1"
    assert datetime.datetime.fromisoformat(bodies[-1]["lastUpdatedTime"]).tzinfo
    assert "are incomplete" not in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["path", "certificate", "token"])
def test_a_status_that_is_refused_is_one_warning(wrong, trainer, tmp_path, monkeypatch, capsys):
    if wrong == "path":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1/status")
    elif wrong == "certificate":
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    else:
        (tmp_path / "token").unlink()
    _report(tmp_path / "out", (1, 2, 3), tracker=None)
    printed = capsys.readouterr().out
    assert len(re.findall("warning: .*TrainJob .*incomplete", printed)) == 1 and "step=3" in printed
    assert trainer.empty() and "hunter2" not in printed


def test_the_time_left_is_that_of_the_steps_of_this_start(monkeypatch):
    bodies = []
    monkeypatch.setattr(trackers.TrainJob, "_post", lambda self, body: bodies.append(json.loads(body)))
    job = trackers.TrainJob(50, 100)
    job._began -= 50  # seconds
    job.log({"loss": 1.0}, 75)
    job.log({"lr": 0.1}, 76)  # too early: it goes with the next request
    job.finish()
    first, last = (body["trainerStatus"] for body in bodies)
    assert first["progressPercentage"] == 75 and 49 <= first["estimatedRemainingSeconds"] <= 55
    assert {each["name"]: each["value"] for each in last["metrics"]} == {"loss": "1", "lr": "0.1"}
    assert last["progressPercentage"] == 76
