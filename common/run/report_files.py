"""The files of a run's reports: metrics.jsonl, confusion.json, TensorBoard events, and those of trackers.
starts.jsonl and ends.jsonl are written by starts.py."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bootfile.ground.errors import BadInput, MissingPackage, import_optional
from bootfile.ground.files import append_json_line, check_mounted, write_atomic
from bootfile.ground.heartbeat import watched
from bootfile.ground.results import CLASSES, CONFUSION
from bootfile.records import METRICS, read_starts
from common.console import arguments
from common.run import environment, starts
from common.run.output import Output

_MOST_CLASSES = 100  # with more classes the matrix is not written


class ReportFiles:
    """Writes the reports of a Log, on rank 0. If a file or a tracker cannot be written, the reason is printed
    once, and the training continues.

    args, output: as for the Log. warn_once: prints a line, or the first line of a subject.
    """

    def __init__(self, args: argparse.Namespace, output: Output, warn_once: Callable[..., object]):
        self._args = args
        self._output = output
        self._warn_once = warn_once
        self._trackers: dict[str, Any] | None = None  # name -> tracker; from the first report on
        self._start: float | None = None  # the time of this start in starts.jsonl
        self.class_names: tuple[str, ...] = ()  # of the training set

    def begin(self, facts: dict[str, Any], receipt: Any, run: str, repeats: bool, continues: bool) -> None:
        """Take what the first report needs; nothing is written yet: a run that fails before its first report
        leaves no files, and does not shorten those of an earlier start.

        facts: what starts.jsonl gets. receipt: of the training loader. The others: as for Log.start().
        """
        self._facts = facts
        self._start = facts["time"]
        self._receipt = receipt
        self._run = run
        self._repeats = repeats
        self._continues = continues

    def open(self) -> None:
        """Begin the files with the first report, and make the folder again if it was deleted. The Log calls
        it before each report."""
        step = self._facts["step"]
        folder = self._output.folder
        with self._reported():
            check_mounted(folder)
            os.makedirs(folder, exist_ok=True)
            if self._trackers is not None:
                return
            # steps after the checkpoint are trained again: their reports would be in the file twice
            lost = None
            if os.path.exists(os.path.join(folder, METRICS)):
                from bootfile.histories import cut_reports  # a first start has no reports

                lost = cut_reports(folder, step, self._repeats)
            # a process that joins an elastic job continues the newest start
            recorded = read_starts(folder) if self._continues else []
            if recorded:
                self._start = recorded[-1].get("time")
            else:
                facts = self._facts | ({"lost": lost} if lost else {})
                starts.write(folder, self._args, environment.facts(), **facts)
                with self._reported():  # without it, the other reports are whole
                    starts.expect_end(folder, facts["time"])
            # the receipt is that of the whole run: it begins where its first start began
            self._receipt.begins_at(min((start["step"] for start in read_starts(folder)), default=step))
            if self.class_names:
                with self._reported():  # the next report would begin the files a second time
                    write_atomic(os.path.join(folder, CLASSES), json.dumps(self.class_names) + "\n")
            # set before they open: a tracker that fails is not opened again with each report
            self._trackers = {}
            self._open_trackers(self._trackers)

    def _open_trackers(self, opened: dict[str, Any]) -> None:
        """Add the trackers of the run to `opened`, by name. One that fails does not keep the others from
        opening."""
        step = self._facts["step"]
        with self._reported("TensorBoard"):
            # the report at this step is deleted too if the run writes it again
            opened["TensorBoard"] = _TensorBoard(self._output.folder, step - self._repeats)
        name = vars(self._args).get("tracker")  # jobs without a training have none
        is_train_job = "KUBEFLOW_TRAINER_SERVER_URL" in os.environ  # the controller of TrainJobs sets it
        if not name and not is_train_job:
            return
        from common.run import trackers  # most jobs have none

        if is_train_job:
            opened["the TrainJob"] = trackers.TrainJob(step, self._facts["steps"])
        if name:
            make = trackers.MLflow if name == "mlflow" else trackers.WandbLike
            title = os.path.basename(str(self._output).rstrip("/"))
            with self._reported(f"--tracker {name}"):
                tracker = make(name, self._run, title, arguments.settings(self._args))
                opened[f"--tracker {name}"] = tracker

    @contextlib.contextmanager
    def _reported(self, tracker: str = "") -> Iterator[None]:
        """Print the reason once if the block, which writes a report, raises an exception."""
        try:
            with watched(self._output.folder):
                yield
        except MissingPackage as error:
            self._warn_once(str(error))
        except Exception as error:  # OSError if the disk is full; packages of trackers raise other types
            what = f"figures of {tracker}" if tracker else f"reports in {self._output.folder}"
            reason = " ".join(str(error).split()) or type(error).__name__  # a MemoryError has no text
            if isinstance(error, OSError) and error.filename2:  # the first name is another one each time
                reason = f"{error.strerror}: {error.filename2}"
            self._warn_once(f"warning: {what} are incomplete: {reason}", tracker)

    def write(self, step: int, line: dict[str, Any], scalars: Mapping[str, float]) -> None:
        """Append a report to metrics.jsonl, and give its scalars to the trackers."""
        if self._trackers is None:  # the files could not be begun
            return
        with self._reported():
            path = os.path.join(self._output.folder, METRICS)
            append_json_line(path, line | {"time": round(time.time(), 3)})
        # after the file: a tracker may be slow, or wait for its server
        for name, tracker in self._trackers.items():
            with self._reported(name):
                tracker.log(scalars, step)

    def write_confusion(self, step: int, counts: dict[str, Any]) -> None:
        """Replace confusion.json after an evaluation. counts: of Metrics.of_classes()."""
        matrix = counts.pop("matrix")
        content: dict[str, Any] = {"step": step, "classes": self.class_names, **counts}
        if matrix is None:
            self._warn_once(
                f"{len(counts['count'])} classes: {CONFUSION} has counts per class, and no matrix"
            )
        # a matrix of 1,000 classes would be megabytes of text
        elif len(matrix) <= _MOST_CLASSES:
            content["matrix"] = matrix.tolist()
        with self._reported():
            write_atomic(os.path.join(self._output.folder, CONFUSION), json.dumps(content) + "\n")

    def describe_last_end(self) -> str:
        """Return one line on how the start before this one ended; "" if it is not known."""
        with contextlib.suppress(OSError, BadInput):  # the folder may be another user's: it is only told
            return starts.describe_last_end(self._output.folder)
        return ""

    def write_end(self, step: int, code: int, reason: str) -> None:
        """Record the end of this start. step: the last one that it began. A start that has reported nothing
        is recorded only in the files of an earlier one."""
        folder = self._output.folder
        with self._reported():
            if self._trackers is not None or os.path.exists(os.path.join(folder, starts.ENDS)):
                starts.write_end(folder, self._start, step, code, reason)

    def close(self) -> None:
        """Finish the trackers at the end of a run, or of the part of it that this process reports."""
        trackers = self._trackers or {}
        self._trackers = {}  # not None: a report after the end does not begin the files again
        for name, tracker in trackers.items():
            with self._reported(name):
                tracker.finish()


class _TensorBoard:
    """TensorBoard's events in the folder of a run. Those of an earlier start after `step` are deleted."""

    def __init__(self, folder: str, step: int):
        events = import_optional("torch.utils.tensorboard", "no TensorBoard events", "tensorboard")
        self._events = events.SummaryWriter(folder, purge_step=step + 1 if step else 0)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()  # the job may be killed at any time

    def finish(self) -> None:
        self._events.close()
