"""--tracker reports to each package without a server or an account, and a failure is one warning."""

import functools
import importlib.util
import sqlite3

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.run import trackers
from tests.conftest import names
from tests.support.checkpointers import StubLoader, begin, log_of


def _report(folder, steps, first, tracker="mlflow"):
    """Report some steps of a run, as a job with --tracker does."""
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
