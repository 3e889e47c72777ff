"""Run a job, count where its host waits for the GPU, and measure how busy the GPU is.

python -m tests.gpu.watch FIRST,MIDDLE,LAST TRACE.json.gz jobs/train.py --max_steps 70 ...

Steps FIRST to MIDDLE: every blocking call by source line (torch.cuda.set_sync_debug_mode). Steps MIDDLE to
LAST: the share of the time in which a kernel or a copy runs, the longest kernels, and a trace for Perfetto.
The last line is JSON. On a CPU no call blocks, and its operators are used instead of kernels.
"""

import collections
import json
import runpy
import sys
import time
import warnings

import torch
from torch.profiler import ProfilerActivity, profile

from common.checkpoint.checkpointer import Checkpointer
from common.ground.files import ROOT

_LONGEST = 15  # kernels


class Watch:
    """A counter of a job's steps: accepts() is called once per step."""

    def __init__(self, first: int, middle: int, last: int):
        self.first, self.middle, self.last = first, middle, last
        self.step = 0
        self.is_gpu = torch.cuda.is_available()
        self.seconds = 0.0
        kind = ProfilerActivity.CUDA if self.is_gpu else ProfilerActivity.CPU
        self.profile = profile(activities=[kind])

    def count(self) -> None:
        self.step += 1
        if self.step == self.first and self.is_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        if self.step == self.middle:
            if self.is_gpu:
                torch.cuda.set_sync_debug_mode("default")
            self.profile.start()
            self.seconds = -self._now()
        if self.step == self.last:
            self.seconds += self._now()
            self.profile.stop()

    def _now(self) -> float:
        if self.is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def summary(self, seen: list[warnings.WarningMessage]) -> dict:
        """Return the figures. seen: all warnings of the run."""
        if self.step < self.last:
            sys.exit(f"the job made {self.step} steps, expected {self.last}")
        places = collections.Counter(
            f"{each.filename.replace(str(ROOT) + '/', '')}:{each.lineno}"
            for each in seen
            if "called a synchronizing" in str(each.message)  # not torch's notice about this mode
        )
        kernels = [
            event
            for event in self.profile.events()
            if str(event.device_type).endswith("CUDA" if self.is_gpu else "CPU")
            and not getattr(event, "is_user_annotation", False)  # a region such as Optimizer.step, with gaps
        ]
        if not kernels:
            sys.exit("the profiler saw no kernel: this machine does not permit CUPTI")
        spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
        busy = reached = 0.0  # microseconds
        for start, end in spans:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        calls, micros = collections.Counter[str](), collections.Counter[str]()
        for event in kernels:
            calls[event.name] += 1
            micros[event.name] += event.time_range.end - event.time_range.start
        steps = self.last - self.middle
        return {
            "waits_per_step": places.total() / (self.middle - self.first),
            "places": dict(places.most_common(12)),
            "ms_per_step": 1000 * self.seconds / steps, "kernels_per_step": len(spans) / steps,
            "busy": busy / 1e6 / self.seconds,
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if self.is_gpu else 0.0,
            "longest": [
                {"kernel": name, "calls_per_step": calls[name] / steps, "share": each / micros.total()}
                for name, each in micros.most_common(_LONGEST)
            ],
        }  # fmt: skip


def main() -> None:
    watch = Watch(*map(int, sys.argv[1].split(",")))
    accepts = Checkpointer.accepts

    def counted(self: Checkpointer, loss: torch.Tensor) -> bool:
        watch.count()
        return accepts(self, loss)

    Checkpointer.accepts = counted
    trace, sys.argv = sys.argv[2], sys.argv[3:]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runpy.run_path(sys.argv[0], run_name="__main__")
    summary = watch.summary(seen)
    watch.profile.export_chrome_trace(trace)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
