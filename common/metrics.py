"""What a job reports: flat log lines, metrics.jsonl, starts.jsonl (common/starts.py), TensorBoard events, a
progress bar, and where the time went.

Rank 0 speaks; in every other process a Log does nothing.
"""

import contextlib
import json
import math
import os
import resource
import sys
import time

import torch
from tqdm import tqdm

from common import arguments, output_folder, starts
from common.checkpoint import mirror, weights
from common.exits import MissingPackage, import_optional
from common.files import opener, write_text


class Log:
    """Reports of one run into `output_dir`, made when the first is written.

    Call lap(name) at the end of each part of the set-up, training(...) before the first step, train(...) and
    validation(...) as figures come in, finish() at the end. Sums are those of evaluation.sums() over all
    processes; reading them here is the only synchronisation with the device.
    """

    def __init__(self, output_dir: str):
        self.output_dir = output_dir
        self._laps: dict[str, float] = {}
        self._lap_start = _process_start()
        self._file = self._events = self._bar = None
        self._said: set[str] = set()
        self._result = "test_accuracy=nan"
        self._classes: tuple[str, ...] = ()
        self._only_evaluates = False

    def lap(self, name: str) -> None:
        """Everything since the last lap (at first: since the process began) was spent on `name`, too."""
        now = time.time()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._lap_start
        self._lap_start = now

    def data(self, train_set, test_set) -> None:
        """Say which source was used, and end the lap "data loading". A data set with `class_names` (a tuple
        of text, in the order of labels) has them written to classes.json."""
        self.lap("data loading")
        self._classes = getattr(train_set, "class_names", ())
        self.say(f"data train={len(train_set)} test={len(test_set)} source={train_set.source}")

    def training(self, loader, step: int, steps: int) -> None:
        """Training begins, or goes on after `step` of `steps`: end the lap "model".

        loader: its `waited` seconds are the time spent waiting for data, its `receipt` says which. What an
        earlier start of the run reported after `step` is dropped from the files: it will be reported again.
        """
        self.lap("model")
        output_folder.begin(self.output_dir)
        given = arguments.settings()
        self._only_evaluates = bool(given.get("evaluate"))
        if self._only_evaluates or (given.get("weights") and step == 0):
            path = given.get("weights") or given["resume"]
            if line := weights.compare_classes(path, self._classes):
                self.say(line)
        self._loader, self._step, self._steps = loader, step, steps
        self._since, self._waited, self._evaluating = time.time(), loader.waited, 0.0
        self._start = {"time": round(self._since, 3), "step": step, "steps": steps, "laps": {**self._laps}}
        self._start["training data"] = loader.receipt.fingerprint

    def train(self, epoch: int, step: int, window: torch.Tensor, lr: float) -> None:
        """One line on the steps since the last report. step counts optimizer steps since the start of
        training; lr is that of the next step."""
        if not _speaks():
            return
        loss_sum, correct, count = window.tolist()
        now, waited = time.time(), self._loader.waited
        elapsed, data_time = now - self._since, waited - self._waited
        self._since, self._waited = now, waited
        self._write(
            epoch=epoch,
            step=step,
            loss=loss_sum / (count or math.nan),  # no step was taken: all were skipped
            **_accuracy("acc", correct, count),
            lr=lr,
            images_per_s=count / elapsed,
            data_time=data_time,
            compute_time=elapsed - data_time,
            memory_mb=peak_memory(),
            receipt=str(self._loader.receipt),
        )
        if sys.stderr.isatty():
            self._bar = self._bar or tqdm(
                total=self._steps, initial=self._step, unit="step", dynamic_ncols=True
            )
            self._bar.update(step - self._bar.n)

        with self._suppressed():
            if self._events:
                self._events.flush()  # the job may be stopped here

    def validation(self, epoch: int, step: int, totals: torch.Tensor) -> None:
        """One line on the test set after an epoch; the time since the last report went into evaluating and
        saving. With --evaluate it is printed, and nothing is written."""
        if not _speaks():
            return
        loss_sum, correct, count = totals.tolist()
        now = time.time()
        self._evaluating += now - self._since
        self._since = now
        loss, accuracy = loss_sum / (count or math.nan), _accuracy("val_acc", correct, count)
        self._result = f"test_accuracy={accuracy['val_acc']:.4f}" if accuracy else f"test_loss={loss:.6g}"
        figures = {"val_loss": loss, **accuracy, "val_count": int(count)}
        if self._only_evaluates:
            self.say(_line(figures))
            return
        self._write(epoch=epoch, step=step, **figures)
        with self._suppressed():
            if self._events:
                self._events.flush()

    def loaded(self, epoch: int, step: int, **figures: float) -> None:
        """One line on an epoch of a job that does nothing but load: `figures`, and the receipt up to
        `step`."""
        if not _speaks():
            return
        self._write(epoch=epoch, step=step, **figures, receipt=str(self._loader.receipt))
        with self._suppressed():
            if self._events:
                self._events.flush()

    @property
    def training_seconds(self) -> float:
        """So far, in steps: without evaluating and saving."""
        return time.time() - self._lap_start - self._evaluating

    def finish(self) -> None:
        """Print the last accuracy (the last loss if the job has none) and the TIME COST table, and close the
        files."""
        if not _speaks() or self._only_evaluates:
            return
        if self._bar:
            self._bar.close()
        self.lap("training")
        waited = self._loader.waited
        computing = self._laps["training"] - waited - self._evaluating
        total = sum(self._laps.values())
        rows = [*self._laps.items(), ("- waiting for data", waited), ("- computing", computing)]
        rows += [("- evaluating and saving", self._evaluating), ("total", total)]
        print(f"\n{'TIME COST':<26}{'seconds':>10}{'share':>9}")
        for name, seconds in rows:
            print(f"{name:<26}{seconds:>10.2f}{seconds / total:>9.1%}")
        print(
            f"\n{self._result} training_seconds={self._laps['training']:.1f} receipt={self._loader.receipt}",
            flush=True,
        )
        arguments.remind(self.say)
        with self._suppressed():
            if self._file:
                self._file.close()
            if self._events:
                self._events.close()

    def _write(self, **figures: float | str) -> None:
        self._open()
        with self._suppressed():
            if self._file:
                self._file.write(json.dumps(figures | {"time": round(time.time(), 3)}) + "\n")
            if self._events:
                for name in figures.keys() - {"epoch", "step", "val_count", "receipt"}:
                    self._events.add_scalar(name, figures[name], figures["step"])
        self.say(_line(figures))

    def _open(self) -> None:
        """Open the files, again where somebody removed them."""
        path = os.path.join(self.output_dir, "metrics.jsonl")
        if self._file and os.path.exists(path):
            return
        with self._suppressed():
            os.makedirs(self.output_dir, exist_ok=True)
            if self._file is None:
                lost = _keep_lines(path, self._step)
                self._start |= {"lost": lost} if lost else {}
                starts.write(self.output_dir, **self._start)
                if self._classes:
                    weights.write_classes(self.output_dir, self._classes)
            self._file = open(path, "a", buffering=1, opener=opener)  # noqa: SIM115
            mirror.watch(self.output_dir)
            purged = self._step + 1 if self._step else 0
            events = import_optional("torch.utils.tensorboard", "no TensorBoard events", "tensorboard")
            self._events = self._events or events.SummaryWriter(self.output_dir, purge_step=purged)

    @contextlib.contextmanager
    def _suppressed(self):
        """A report that cannot be written is said, and does not end the training."""
        try:
            yield
        except MissingPackage as error:
            self._warn(str(error))
        except Exception as error:  # a full disk as OSError, and whatever TensorBoard makes of it
            self._warn(f"warning: reports in {self.output_dir} are incomplete: {error}")

    def _warn(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line, past the progress bar."""
        if _speaks():
            with contextlib.suppress(OSError, ValueError):  # a log on a full disk does not end the training
                tqdm.write(line)
                sys.stdout.flush()


def _speaks() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _keep_lines(path: str, step: int) -> dict[str, float] | None:
    """Drop from a metrics.jsonl what was reported after `step`, and the evaluation at it: a checkpoint is
    older than the evaluation of its epoch. A line that a killed run left unfinished goes, too.

    Returns the step and the time of the last report where it came after `step`."""
    if not os.path.exists(path):
        return None
    kept, last = [], None
    with open(path, encoding="utf-8", errors="replace", opener=opener) as file:
        for line in file:
            try:
                figures = json.loads(line)
                if figures["step"] < step or (figures["step"] == step and "loss" in figures):
                    kept.append(line)
                elif figures["step"] > step:
                    last = {"step": figures["step"], "time": figures["time"]}
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
    write_text(path, "".join(kept))
    return last


def _accuracy(name: str, correct: float, count: float) -> dict[str, float]:
    """Return the accuracy under this name; nothing if the job is not a classification (evaluation.sums)."""
    return {} if math.isnan(correct) else {name: correct / (count or math.nan)}


def _line(figures: dict[str, float | str]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in figures.items())


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.4g}" if isinstance(value, float) and abs(value) >= 1000 else f"{round(value, 6):.6g}"


def _process_start() -> float:
    """When this process began, in seconds of time.time(), so that importing torch counts as set-up."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.time()


def peak_memory() -> float:
    """The most memory that this process has held so far, in MB: allocated by torch on its GPU, or resident on
    the host."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e6
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (1e6 if sys.platform == "darwin" else 1e3)  # bytes there
