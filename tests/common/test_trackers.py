"""--tracker reports to MLflow's file store; no server is needed."""

import mlflow
import pytest
import torch

from common.ground.exits import BadInput
from common.run import trackers
from tests.support.checkpointers import StubLoader, log_of


def _report(folder, steps, first):
    """Report some steps of a run, as a job with --tracker mlflow does."""
    log, loader = log_of(folder), StubLoader(10)
    loader.commit = lambda *_: None
    log.args.tracker, log.args.lr, log.args.secret_key, log.run = "mlflow", 0.1, "hunter2", "run-1"
    log.start(loader, first, 10)
    for step in steps:
        sums = torch.tensor([step, 1.0, 2.0], dtype=torch.float64)
        log.step(step, sums.clone(), None)
    log.validation(step, sums)
    log.finish()


def test_a_restart_continues_the_run_at_the_tracker(tmp_path, monkeypatch, capsys):
    store = f"file:{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
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


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    _report(tmp_path / "out", (1, 2), 0)
    printed = capsys.readouterr().out
    assert "are incomplete" in printed and "step=2" in printed


def test_a_package_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="--tracker wandb needs a package: pip install wandb"):
        trackers.check("wandb")
