"""Send a run's settings and figures to the package that --tracker names, and to the status of its TrainJob.

    MLFLOW_TRACKING_URI=http://host:5000 MLFLOW_EXPERIMENT_NAME=digits python jobs/train.py --tracker mlflow
    WANDB_PROJECT=digits python jobs/train.py --tracker wandb

The packages read their own environment variables. A tracker is made on rank 0 with the first report, from the
name of the package, our id of the run, by which a restart continues it, the title that the package shows, and
settings, plain values. It has log(figures, step) and finish(), which raise the errors of the package.

Kubeflow Trainer 2.2 and later reads the status of a TrainJob if its feature gate TrainJobStatus is on. It
then sets the variables that TrainJob reads. Source: docs/user-guides/trainjob-progress.md of
kubeflow/trainer, tag v2.3.0. It was not run in a cluster.
"""

import datetime
import importlib.util
import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from bootfile.ground.errors import MissingPackage, import_optional

_TAG = "bootfile.run"  # the tag of an MLflow run with our run id, which a checkpoint stores
# short time-outs: the training waits for each request
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
_INTERVAL = 5.0  # seconds between two requests of a TrainJob, as the guide asks
_TIMEOUT = 5.0  # seconds of a request
_MOST_METRICS = 256  # the limits of the resource
_LONGEST_NAME = 64


def check(name: str) -> None:
    """Raise MissingPackage if the package of a tracker is not installed. The package is not imported."""
    if importlib.util.find_spec(name) is None:
        raise MissingPackage(f"--tracker {name} needs a package: pip install {name}")


class MLflow:
    """The active run of MLflow. A restart finds it by a tag with our id, and continues it."""

    def __init__(self, package: str, run: str, title: str, settings: Mapping[str, Any]):
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._mlflow = import_optional(package, f"--tracker {package} needs MLflow")
        find = f"tags.`{_TAG}` = '{run}'"
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
    """A run of a package with the interface of wandb. A restart continues it."""

    def __init__(self, package: str, run: str, title: str, settings: Mapping[str, Any]):
        module = import_optional(package, f"--tracker {package} needs its package")
        place = {"id": run, "name": title}
        if package == "trackio":  # it has no ids: it continues a run of the same name
            place = {"project": os.environ.get("TRACKIO_PROJECT", "bootfile"), "name": f"{title} {run}"}
        self._run = module.init(resume="allow", config=dict(settings), **place)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self) -> None:
        self._run.finish()


class TrainJob:
    """The progress, the remaining time and the figures in the status of a TrainJob.

    first: the step at which this start began. total: steps of the run, None if they are not known. A thread
    sends the requests, so a server that does not answer never delays a step. log() raises the error of an
    earlier one.
    """

    def __init__(self, first: int, total: int | None):
        self._first = first
        self._total = total
        self._step = first
        self._began = time.monotonic()
        self._next = self._began  # the earliest time of the next request
        self._metrics: dict[str, str] = {}  # the server replaces all figures at once
        self._thread = threading.Thread()  # that of the last request
        self._errors: list[Exception] = []  # those of requests, until they are raised

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Keep the figures of a report, and send them if the last request is old enough and has ended."""
        self._step = step
        self._metrics |= {name[:_LONGEST_NAME]: f"{value:.6g}" for name, value in figures.items()}
        now = time.monotonic()
        # the training does not wait: a report that comes too early goes with the next request
        if now >= self._next and not self._thread.is_alive():
            self._next = now + _INTERVAL
            self._send()
        self._raise_error()

    def finish(self) -> None:
        """Send the last figures, and wait up to 5 s for each of the last two requests."""
        if self._thread.ident:
            self._thread.join(_TIMEOUT)
        self._send()
        self._thread.join(_TIMEOUT)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors.pop()

    def _send(self) -> None:
        """Send the status in a thread."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        metrics = [{"name": name, "value": value} for name, value in self._metrics.items()]
        status: dict[str, Any] = {"metrics": metrics[:_MOST_METRICS], "lastUpdatedTime": now}
        if self._total:
            seconds_per_step = (time.monotonic() - self._began) / max(1, self._step - self._first)
            status["progressPercentage"] = 100 * self._step // self._total
            status["estimatedRemainingSeconds"] = round(seconds_per_step * (self._total - self._step))
        body = json.dumps({"trainerStatus": status}).encode()
        self._thread = threading.Thread(target=self._post, args=(body,), daemon=True)
        self._thread.start()

    def _post(self, body: bytes) -> None:
        """Send one request, in a thread, and keep its error."""
        try:
            with open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"], encoding="ascii") as file:  # it changes
                headers = {"Authorization": f"Bearer {file.read().strip()}"}
            context = ssl.create_default_context(cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
            request = urllib.request.Request(os.environ["KUBEFLOW_TRAINER_SERVER_URL"], body, headers)
            urllib.request.urlopen(request, timeout=_TIMEOUT, context=context).close()
        except Exception as error:  # also a variable or a file that is missing
            self._errors.append(error)
