"""Send a run's settings and figures to MLflow or to Weights & Biases (--tracker).

    MLFLOW_TRACKING_URI=http://host:5000 MLFLOW_EXPERIMENT_NAME=digits python jobs/train.py --tracker mlflow
    WANDB_PROJECT=digits python jobs/train.py --tracker wandb

The packages read their own environment variables. Their credentials are not options of a job.
"""

import importlib.util
import os
import time
from collections.abc import Mapping
from typing import Any

from common.ground.exits import MissingPackage, import_optional

_TAG = "bootfile.run"  # the tag of an MLflow run with our run id, which a checkpoint stores
# short time-outs: the training waits for each request
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def check(name: str) -> None:
    """Raise MissingPackage if the package of a tracker is not installed. The package is not imported."""
    if importlib.util.find_spec(name) is None:
        raise MissingPackage(f"--tracker {name} needs a package: pip install {name}")


def open_tracker(name: str, run: str, title: str, settings: Mapping[str, Any]) -> "MLflow | WeightsAndBiases":
    """Return the run with the id `run` at a tracker. The same id continues the same run.

    name: "mlflow" or "wandb".
    run: the id.
    title: the name that the tracker shows.
    settings: plain values.
    Raises MissingPackage, and the errors of the package.
    """
    kinds: dict[str, type[MLflow] | type[WeightsAndBiases]] = {"mlflow": MLflow, "wandb": WeightsAndBiases}
    return kinds[name](run, title, settings)


class MLflow:
    """A run at MLflow. A restart finds it by a tag."""

    def __init__(self, run: str, title: str, settings: Mapping[str, Any]):
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        mlflow = import_optional("mlflow", "--tracker mlflow needs MLflow")
        self._entities = import_optional("mlflow.entities", "--tracker mlflow needs MLflow", "mlflow")
        self._client = mlflow.MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self._client.create_experiment(experiment)
        known = self._client.search_runs([place], f"tags.`{_TAG}` = '{run}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(place, tags={_TAG: run}, run_name=title).info.run_id
        params = [self._entities.Param(key, str(value)) for key, value in settings.items()]
        self._client.log_batch(self._id, params=params)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._id)


class WeightsAndBiases:
    """A run at Weights & Biases with our id. It ignores figures of steps that it has received before."""

    def __init__(self, run: str, title: str, settings: Mapping[str, Any]):
        wandb = import_optional("wandb", "--tracker wandb needs Weights & Biases")
        self._run = wandb.init(id=run, resume="allow", name=title, config=dict(settings))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self) -> None:
        self._run.finish()
