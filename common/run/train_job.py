"""Send the progress, the remaining time and the figures of a run to the status of its TrainJob.

Kubeflow Trainer 2.2 and later reads them if its feature gate TrainJobStatus is on. It then sets three
variables: KUBEFLOW_TRAINER_SERVER_URL, and the paths KUBEFLOW_TRAINER_SERVER_CA_CERT and
KUBEFLOW_TRAINER_SERVER_TOKEN. Without the first one nothing is sent, and this file is not loaded. Source:
docs/user-guides/trainjob-progress.md of kubeflow/trainer, tag v2.3.0. It was not run in a cluster.
"""

import datetime
import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

_INTERVAL = 5.0  # seconds between two requests, as the guide asks
_TIMEOUT = 5.0  # seconds of a request
_MOST_METRICS = 256  # the limits of the resource
_LONGEST_NAME = 64


class TrainJob:
    """The status of a TrainJob, as a tracker of ReportFiles.

    first: the step at which this start began. total: steps of the run, None if they are not known. A thread
    sends the requests, so a server that does not answer never delays a step. log() raises the error of an
    earlier request, which ReportFiles prints once.
    """

    def __init__(self, first: int, total: int | None):
        self._first = first
        self._total = total
        self._step = first
        self._began = time.monotonic()
        self._next = self._began  # the earliest time of the next request
        self._metrics: dict[str, str] = {}  # the server replaces all figures at once
        self._thread: threading.Thread | None = None  # that of the last request
        self._errors: list[Exception] = []  # those of requests, until they are raised

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Keep the figures of a report, and send them if the last request is old enough and has ended."""
        self._step = step
        self._metrics |= {name[:_LONGEST_NAME]: f"{value:.6g}" for name, value in figures.items()}
        now = time.monotonic()
        # the training does not wait: a report that comes too early goes with the next request
        if now >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = now + _INTERVAL
            self._send()
        self._raise_error()

    def finish(self) -> None:
        """Send the last figures, and wait up to 5 s for each of the last two requests."""
        if self._thread:
            self._thread.join(_TIMEOUT)
        self._send().join(_TIMEOUT)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors.pop()

    def _send(self) -> threading.Thread:
        """Send the status in a thread, and return the thread."""
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
        return self._thread

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
