"""The status of a TrainJob is sent as Kubeflow's guide says, and no failure ends the run or is sent twice."""

import datetime
import functools
import http.server
import json
import lzma
import queue
import re
import ssl
import threading

import jsonschema
import pytest
import torch
import trustme
import yaml

from common.run import train_job
from tests.conftest import ROOT
from tests.support.checkpointers import StubLoader, begin, log_of


def _report(folder, steps):
    """Report some steps of a run of 10, as a job does."""
    log, loader = log_of(folder, lr=0.1), StubLoader(10)
    loader.commit = lambda *_: None
    begin(log, loader, 0, 10, "run-1")
    for loader.step in steps:
        sums = torch.tensor([loader.step, 1.0, 2.0], dtype=torch.float64)
        log.report(sums.clone(), None)
    log.finish()


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Return the queue of (authorization, body) that the status address of a TrainJob has taken."""
    monkeypatch.setattr(train_job, "_INTERVAL", 0.0)
    monkeypatch.setattr(train_job, "_TIMEOUT", 60.0)  # a slow machine
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
    _report(tmp_path / "out", (2, 5, 10))
    bodies = _taken(trainer)
    assert bodies[0]["progressPercentage"] == 20 and bodies[0]["estimatedRemainingSeconds"] >= 0
    assert bodies[-1]["progressPercentage"] == 100 and bodies[-1]["estimatedRemainingSeconds"] == 0
    figures = {each["name"]: each["value"] for each in bodies[-1]["metrics"]}
    assert figures["loss"] == "5" and figures["lr"] == "0.1"
    assert datetime.datetime.fromisoformat(bodies[-1]["lastUpdatedTime"]).tzinfo
    assert "are incomplete" not in capsys.readouterr().out


def test_a_start_that_was_stopped_is_not_complete(trainer, tmp_path):
    _report(tmp_path / "out", (2, 5))
    assert _taken(trainer)[-1]["progressPercentage"] == 50


@pytest.mark.parametrize("wrong", ["path", "certificate", "token"])
def test_a_status_that_is_refused_is_one_warning(wrong, trainer, tmp_path, monkeypatch, capsys):
    if wrong == "path":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1/status")
    elif wrong == "certificate":
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    else:
        (tmp_path / "token").unlink()
    _report(tmp_path / "out", (1, 2, 3))
    printed = capsys.readouterr().out
    assert len(re.findall("warning: .*TrainJob .*incomplete", printed)) == 1 and "step=3" in printed
    assert trainer.empty() and "hunter2" not in printed


def test_nothing_is_sent_without_the_variable(trainer, tmp_path, monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    _report(tmp_path / "out", (1, 2))
    assert trainer.empty()
