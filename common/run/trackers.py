"""Send a run's settings and figures to the package that --tracker names.

    MLFLOW_TRACKING_URI=http://host:5000 MLFLOW_EXPERIMENT_NAME=digits python jobs/train.py --tracker mlflow
    WANDB_PROJECT=digits python jobs/train.py --tracker wandb

The packages read their own environment variables. Their credentials are not options of a job. A tracker has
log(figures, step) and finish(). All functions raise MissingPackage and the errors of the package.
"""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from bootfile.ground.errors import MissingPackage, import_optional

_TAG = "bootfile.run"  # the tag of an MLflow run with our run id, which a checkpoint stores
# short time-outs: the training waits for each request
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def check(name: str) -> None:
    """Raise MissingPackage if the package of a tracker is not installed. The package is not imported."""
    if importlib.util.find_spec(name) is None:
        raise MissingPackage(f"--tracker {name} needs a package: pip install {name}")


class MLflow:
    """The active run of MLflow. A restart finds it by a tag with our id `run`, and continues it.

    title: the name that MLflow shows. settings: plain values.
    """

    def __init__(self, run: str, title: str, settings: Mapping[str, Any]):
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._mlflow = import_optional("mlflow", "--tracker mlflow needs MLflow")
        find = f"tags.`{_TAG}` = '{run}'"
        # a restart has the id of the run from its checkpoint
        known = self._mlflow.search_runs(filter_string=find, max_results=1, output_format="list")
        if known:
            self._mlflow.start_run(known[0].info.run_id)
        else:
            self._mlflow.start_run(run_name=title, tags={_TAG: run})
            self._mlflow.log_params(dict(settings))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(figures), step)

    def finish(self) -> None:
        self._mlflow.end_run()


class WandbLike:
    """A run of a package with the interface of wandb. A restart continues it.

    run, title, settings: as for MLflow.
    """

    def __init__(self, package: str, run: str, title: str, settings: Mapping[str, Any]):
        module = import_optional(package, f"--tracker {package} needs its package")
        # wandb continues the run of this id
        place = {"id": run, "name": title}
        if package == "trackio":  # it has no ids: it continues a run of the same name
            place = {"project": os.environ.get("TRACKIO_PROJECT", "bootfile"), "name": f"{title} {run}"}
        self._run = module.init(resume="allow", config=dict(settings), **place)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self) -> None:
        self._run.finish()


def start(package: str, run: str, title: str, settings: Mapping[str, Any]) -> Any:
    """Return the tracker of a package. The arguments are those of MLflow and WandbLike. The log calls it on
    rank 0 with the first report, then log() with each report, and finish() at the end of main()."""
    if package == "mlflow":
        return MLflow(run, title, settings)
    return WandbLike(package, run, title, settings)
