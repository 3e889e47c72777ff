"""Report a run: log lines, a progress bar and a table of the time. report_files.py writes the files.

It takes sums over all ranks (evaluation.batch_sums()) and figures by name, on every rank: rank 0 prints and
writes, the others only send their part of the receipt. The times of a report are those of rank 0.
"""

import argparse
import contextlib
import datetime
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tqdm import tqdm

from bootfile.ground import accelerator, errors
from bootfile.ground.data_sets import check_map_style, class_names_of
from bootfile.ground.errors import printable
from bootfile.ground.heartbeat import watched
from bootfile.ground.secrets import mask
from bootfile.processes import ranks
from common.ground import endings
from common.run import environment, starts
from common.run.evaluation import Metrics
from common.run.output import Output, writes_nothing
from common.run.report_files import ReportFiles

_NO_SCALARS = {"val_count", "receipt", "ranks"}  # figures that trackers do not get
_ONLY_IN_FILES = {"compute_time", "memory_mb", "receipt", "val_count"}  # a terminal has no room for them
_SECONDS = {"data_time", "compute_time", "lost_seconds"}
_WHOLE_FROM = {"memory_mb": 0}  # the value from which a figure is shown as a whole number; others: 1,000
_WIDTH = 100  # columns of a line on a terminal
_LAST_WRITE = 4.0  # seconds to wait for the record of an error that ends the job


class Log:
    """Prints the lines of a run, and writes metrics.jsonl, starts.jsonl, receipt.bin, TensorBoard events.

    args: the arguments of a JobParser. output: the folder of the files, which are made with the first report.
    Rank 0 prints and writes. Sums are those of evaluation.batch_sums() over all ranks; to read them here is
    the only synchronisation with the device.
    """

    def __init__(self, args: argparse.Namespace, output: Output):
        self.args = args
        self.output = output
        self.metrics = Metrics()  # of the evaluations, besides loss and accuracy
        self._autocast: Any = contextlib.nullcontext()  # names the precision in the first lines
        self._total_steps: int | None = None  # the steps of the whole run, from start() on, if known
        self._laps: dict[str, float] = {}  # seconds of each part of the run
        self._lap_start = endings.STARTED  # importing torch counts as set-up
        self._bar: tqdm | None = None  # on a terminal, from start() on
        self._loader: Any = None  # that of the training, from start() until finish()
        self.warn_once = errors.Once(self.info)  # a line, or the first line of a subject
        self._files = ReportFiles(args, output, self.warn_once)
        self._profiled: list[float] = []  # with --prof: the times of the two reports
        self._unit = ("images", 1)  # what is counted for the speed, and how many a sample has
        self._result = ""  # text about the last evaluation
        self.lost = ""  # why receipt.bin is not whole, after finish()
        self._last_step = 0  # after finish()
        self._is_over = False  # the last line was printed
        self.members: Callable[[], dict[str, float]] = dict  # Memory.figures(), if processes may be lost
        self.parent: dict[str, Any] = {}  # where the run begins, if that is a step of another one (fork.py)
        self.pace: Callable[[], dict[str, Any]] = dict  # Pace.figures(), if there are several ranks
        self._trains = False  # whether the job reports steps, and not only epochs of loading
        self._writes = not writes_nothing(args)
        self._end_lap("imports and set-up")

    def use(self, metrics: Metrics | None = None, autocast: Any = None) -> None:
        """Report these metrics of an evaluation besides loss and accuracy, and name the precision of this
        context of mixed precision. A job calls it on every rank before start()."""
        self.metrics = metrics or self.metrics
        self._autocast = autocast or self._autocast

    def start(
        self,
        loader: Any,
        step: int,
        total_steps: int | None,
        model: torch.nn.Module | None = None,
        rate: Callable[[], Any] = lambda: None,
        scheduler: Any = None,
        run: str = "",
        repeats: bool = False,
        continues: bool = False,
    ) -> None:
        """Begin to report a training, or continue after `step`. The Checkpointer, or a job without one, calls
        it on every rank before the first step. Reports of an earlier start after `step` are deleted from the
        files: these steps are reported again.

        loader: that of the training. total_steps: of the whole run, if they are known.
        model: describe this model in the log, and show a progress bar on a terminal.
        rate: returns the learning rate of the last step, a number, a tensor or None.
        scheduler: that which checkpoints hold. run: the id of the run for --tracker; a restart keeps it.
        repeats: the report at `step` is written again.
        continues: a process has begun before and others were lost: not a start.
        """
        self._end_lap("model and checkpoint")
        if ranks.is_first():
            self.output.begin()
        self._loader = loader
        self._rate = rate
        self._scheduler = scheduler
        self._total_steps = total_steps
        self._first_step = step
        self._since = time.monotonic()  # when the last report was written
        self._began = self._since
        self._waited = loader.waited  # seconds for data until then
        self._evaluating = 0.0  # seconds of evaluating and saving
        facts: dict[str, Any] = {
            "time": round(time.time(), 3),
            "step": step,
            "steps": total_steps,
            "laps": dict(self._laps),
            "training data": loader.receipt.fingerprint,
            "data backend": getattr(loader, "backend", ""),
            "division": getattr(loader, "division", ""),
            "sampling": getattr(loader, "sampling", {}),
        }
        further = {"best": self.metrics.best_of, "parent": self.parent}  # most runs have neither
        facts |= {name: value for name, value in further.items() if value}
        self._files.begin(facts, loader.receipt, run, repeats, continues)
        endings.at_end("results", self._end)
        endings.at_end("upload", self._record_error)  # before the last upload
        endings.at_end("loaders", self._print_last)  # after it
        if continues or not ranks.is_first():
            return
        if self._writes and (line := self._files.describe_last_end()):
            self.info(line)
        if model is None:
            return
        folder = (str(self.output), self.output.folder)
        for line in environment.describe(self.args, model, self._autocast, total_steps, len(loader), folder):
            self.info(line)
        if sys.stderr.isatty() and self._writes:
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def print_data(self, train_set: Any, test_set: Any) -> None:
        """Print the sizes of the data sets and their source, on every rank. The time until now counts as
        loading data. The class names of the training set, if it has any, are written to classes.json. Its
        attribute `unit`, such as ("tokens", 128), is what the log counts per second, and how many a sample
        has (default: samples). Raises BadInput if a data set is not map-style."""
        self._end_lap("data loading")
        check_map_style(train_set)
        check_map_style(test_set)
        self._files.class_names = class_names_of(train_set)
        self._unit = getattr(train_set, "unit", ("samples", 1))
        source = getattr(train_set, "source", type(train_set).__name__)  # one of the user's may have none
        self.info(f"data train={len(train_set)} test={len(test_set)} source={source}")

    def advance(self, step: int) -> None:
        """Move the progress bar, if there is one, to this step."""
        if self._bar:
            self._bar.update(step - self._bar.n)  # tqdm draws at most ten times a second

    def report(self, running: torch.Tensor, scheduler: Any) -> None:
        """Report the steps since the last report, commit the loader's receipt, and set `running` to zero. A
        job calls it on every rank each time the steps of a report have ended. With --prof nothing is
        reported: see profiled_seconds.

        running: float64 [3], sums over all ranks.
        scheduler: that of the job; a warning is printed if it is not the one that checkpoints hold.
        """
        step = self._loader.step
        if scheduler is not self._scheduler:
            self.warn_once(
                f"warning: the schedule {type(scheduler).__name__} is not the one that was given to the "
                "Checkpointer: a restart will not be exact. Build it before resume(), for all epochs"
            )
        if vars(self.args).get("prof"):
            # for the clock only: the steps between wait for nothing
            accelerator.of(running.device).synchronize()
            self._profiled.append(time.monotonic())
            return
        self._trains = True
        # a collective: every rank comes here for each report
        self._commit(step)
        if ranks.is_first():
            self._write_steps(step, running)
        running.zero_()

    def _write_steps(self, step: int, running: torch.Tensor) -> None:
        """Write and print the report of the steps since the last one, on rank 0. running: their sums."""
        loss_sum, correct, count = running.tolist()  # here the host waits for the device
        # the host has waited for the device: all steps of this report have ended
        now = time.monotonic()
        elapsed = now - self._since
        data_time = self._loader.waited - self._waited
        self._since = now
        self._waited = self._loader.waited
        loss = loss_sum / (count or math.nan)  # count is 0 if all steps were skipped
        rate = self._rate()
        pace = self.pace()
        unit, per_sample = self._unit
        if self._bar:
            self._bar.set_postfix(loss=_short("loss", loss), refresh=False)
        self.advance(step)
        self._write(
            step,
            loss=loss,
            **_accuracy("acc", correct, count),
            lr=float("nan" if rate is None else rate),
            **{f"{unit}_per_s": count * per_sample / elapsed},
            data_time=data_time,
            compute_time=elapsed - data_time,
            memory_mb=peak_memory(),
            **self.members(),
            receipt=str(self._loader.receipt),
            **({"ranks": pace} if pace else {}),  # nothing with one rank
        )

    def validation(self, val_sums: torch.Tensor) -> None:
        """Report an evaluation. A job calls it on every rank after each one. The time since the last report
        counts as evaluating and saving.

        val_sums: the result of evaluation.evaluate(), over all ranks. With --evaluate it is only printed.
        """
        if not ranks.is_first():
            return
        self._trains = True
        step = self._loader.step
        # here the host waits for the device
        _, correct, count = val_sums[:3].tolist()
        now = time.monotonic()
        # the time since the report before the evaluation: reports of steps do not count it
        self._evaluating += now - self._since
        self._since = now
        loss = self.metrics.loss(val_sums)
        accuracy = _accuracy("val_acc", correct, count)
        result = f"test_accuracy={accuracy['val_acc']:.4f}" if accuracy else f"test_loss={loss:.6g}"
        self._result = f"{result} "
        others = {f"val_{name}": value for name, value in self.metrics.values(val_sums).items()}
        figures: dict[str, Any] = {"val_loss": loss, **accuracy, **others}
        if vars(self.args).get("evaluate"):
            # the result of the program, which is compared with others: all digits that float32 has
            shown = [f"{name}={value:.6g}" for name, value in figures.items()]
            self.info(" ".join([*shown, f"val_count={count:.0f}"]))
            return
        self._write(step, **figures, val_count=int(count))
        if counts := self.metrics.of_classes(val_sums):
            self._files.write_confusion(step, counts)

    def epoch(self, **figures: float) -> None:
        """Report an epoch of a job that only loads data, on every rank: `figures`, and the receipt."""
        step = self._loader.step
        self._commit(step)
        if ranks.is_first():
            self._write(step, **figures, receipt=str(self._loader.receipt))

    def show(self, step: int, **figures: float | str) -> None:
        """Print a line of figures of this step, on rank 0. A job that only loads data calls it in each step.
        In a file or a pipe, as on a platform, the line has the local time and the estimated time until the
        end of the run. On a terminal, whose progress bar shows these, it has at most _WIDTH columns."""
        if not ranks.is_first():
            return
        progress = f"epoch={self._epoch_of(step)} step={self._of_all(step)}"
        if sys.stdout.isatty():
            shown = {name: value for name, value in figures.items() if name not in _ONLY_IN_FILES}
            line = f"{progress} {_line(shown)}"
            # the least important figure is the last one
            self.info(line if len(line) <= _WIDTH else line[: _WIDTH + 1].rpartition(" ")[0])
            return
        progress += f" time={datetime.datetime.now().isoformat(timespec='seconds')}"
        if self._total_steps and step > self._first_step:
            # the pace of this start, with its evaluations and saves, as the rest will have them
            seconds_per_step = (time.monotonic() - self._began) / (step - self._first_step)
            minutes, rest = divmod(round(seconds_per_step * (self._total_steps - step)), 60)
            progress += f" eta={minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        self.info(f"{progress} {_line(figures)}")

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Show the time of the block as a separate row of the TIME COST table."""
        self._end_lap("model and checkpoint")  # the lap before
        yield
        self._end_lap(name)

    @property
    def training_seconds(self) -> float:
        """Return the seconds of training so far, without evaluating and saving."""
        return self._laps.get("training", time.monotonic() - self._lap_start) - self._evaluating

    @property
    def profiled_seconds(self) -> float:
        """Return the seconds of the last N steps of a run with --prof N."""
        before, after = self._profiled
        return after - before

    def finish(self) -> None:
        """Print the last result and the TIME COST table, and close the files, on rank 0. If main() returns
        without it, it is called then."""
        if self._loader is None or not ranks.is_first():
            return
        loader = self._loader
        self._last_step = loader.step
        self._loader = None  # a second call does nothing
        if self._bar:
            self._bar.close()
        if self._trains and self._writes:
            self._print_time_cost(loader)
        if self._writes:
            self.lost = loader.receipt.finish(self.output.folder)
            self._files.write_end(loader.step, 0, starts.DONE)
        self._files.close()

    def _end(self, error: BaseException | None) -> None:
        """Close the files at the end of main(), on every rank; endings calls it. error: what ended main()."""
        if error is None:
            self.finish()
        elif isinstance(error, endings.Changed):  # this process continues
            self._files.close()

    def print_end(self, step: int, code: int, reason: str) -> None:
        """Print the last line of a run on rank 0: END of bootfile/ground/log_lines.py. The arguments are
        those of ends.jsonl."""
        self._is_over = True
        if self._writes:
            self.info(f"end: {mask(reason)} at step {self._of_all(step)}, exit code {code}")

    def _print_last(self, error: BaseException | None) -> None:
        """Print the last line of a run that is done, or whose last upload has failed with this error, unless
        another end was printed before."""
        if self._is_over or isinstance(error, endings.Changed):
            return
        code, reason = starts.end_of_error(error) if error else (0, "finished")
        self.print_end(self._last_step, code, reason)

    def record_signal(self, step: int) -> None:
        """Record that the run stops after this step because of a signal, on rank 0."""
        self._files.write_end(step, *starts.end_of_signal())

    def _record_error(self, error: BaseException | None) -> None:
        """Print and record the error that ended main(), on rank 0, before the last upload."""
        if error is None or isinstance(error, endings.Changed) or not ranks.is_first():
            return
        step = self._loader.step if self._loader is not None else self._last_step
        code, reason = starts.end_of_error(error)
        self.print_end(step, code, reason)
        # a thread: on a mount that hangs this process must end all the same
        writing = threading.Thread(target=self._files.write_end, args=[step, code, reason], daemon=True)
        writing.start()
        writing.join(_LAST_WRITE)

    def info(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar. Any rank may call it at any time."""
        if ranks.is_first():
            # through tqdm: print() would write into the progress bar
            with contextlib.suppress(OSError, ValueError):  # a log on a full disk must not stop the training
                tqdm.write(printable(line))
                sys.stdout.flush()

    def _end_lap(self, name: str) -> None:
        """Add the time since the last call (the first time: since endings.STARTED) to the lap `name`."""
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._lap_start
        self._lap_start = now

    def _print_time_cost(self, loader: Any) -> None:
        """Print the table at the end of the log, after the last lap."""
        self._end_lap("training")
        # what is left of the training: the time in which the rank neither waited for data nor evaluated
        computing = self._laps["training"] - loader.waited - self._evaluating
        total = sum(self._laps.values())
        rows = self._laps | {
            "- waiting for data": loader.waited,  # a part of "training", not in the total again
            "- computing": computing,
            "- evaluating and saving": self._evaluating,
            "total": total,
        }
        print(f"\n{'TIME COST':<26}{'seconds':>10}{'share':>9}")
        for name, seconds in rows.items():
            print(f"{name:<26}{seconds:>10.2f}{seconds / total:>9.1%}")
        if figures := self.members():  # processes may be lost and replaced in this run
            print(
                f"\ngenerations {figures['generations']}, lost processes {figures['lost_processes']}, "
                f"{figures['lost_seconds']:.1f} s without a step: useful share {figures['useful_share']:.1%}"
            )
        pace = self.pace()
        of_ranks = f" lost_to_slowest={pace['lost']:.1%}" if pace else ""  # of several
        seconds = f"training_seconds={self._laps['training']:.1f}{of_ranks}"
        print(f"\n{self._result}{seconds} receipt={loader.receipt}", flush=True)

    def _commit(self, step: int) -> None:
        """Extend the receipt with each report. Rank 0 writes it; the others only send their sums."""
        if ranks.is_first():
            self._files.open()
        try:
            with watched(self.output.folder):
                self._loader.commit(step, self.output.folder)
        except OSError as error:
            self.warn_once(f"warning: {self.output.folder} lacks a part of the receipt: {error}")

    def _write(self, step: int, **figures: Any) -> None:
        """Write a report to the files, and print it, on rank 0. figures: numbers, and texts; `ranks`, a
        dictionary, is only written to metrics.jsonl."""
        self._files.open()
        line: dict[str, Any] = {"epoch": self._epoch_of(step), "step": step, **figures}
        scalars = {name: float(figures[name]) for name in figures.keys() - _NO_SCALARS}
        self._files.write(step, line, scalars)
        figures.pop("ranks", None)
        self.show(step, **figures)

    def _epoch_of(self, step: int) -> int:
        """Return the epoch of this step, counted from 1."""
        return max(1, math.ceil(step / len(self._loader)))

    def _of_all(self, step: int) -> str:
        """Return a step as "40/180", or "40" if the number of steps is not known."""
        return f"{step}/{self._total_steps}" if self._total_steps else f"{step}"


def _accuracy(name: str, correct: float, count: float) -> dict[str, float]:
    """Return the accuracy under this name; {} if the job is not a classification."""
    return {} if math.isnan(correct) else {name: correct / (count or math.nan)}


def _line(figures: Mapping[str, float | str]) -> str:
    """Return the figures of a report as a line of the log."""
    return " ".join(f"{name}={_short(name, value)}" for name, value in figures.items())


def _short(name: str, value: float | str) -> str:
    """Return a figure as the log shows it, in the digits that a reader needs. metrics.jsonl has all."""
    if isinstance(value, str | int):
        return str(value)
    if name in _SECONDS:
        return f"{value:.2f}"
    whole_from = 100 if name.endswith("_per_s") else _WHOLE_FROM.get(name, 1000)
    return f"{value:.0f}" if whole_from <= abs(value) < 1e7 else f"{value:.4g}"


def peak_memory() -> float:
    """Return the peak memory of this process so far, in MB: on its GPU (of torch), or on the host."""
    module = accelerator.in_use()
    if hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated() / 1e6
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (1e6 if sys.platform == "darwin" else 1e3)  # macOS counts bytes, others KiB
