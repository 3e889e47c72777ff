"""Run a job, count where its host waits for the GPU, and measure how busy the GPU is.

python -m tests.gpu.watch FIRST,MIDDLE,LAST jobs/train.py --max_steps 70 ...

Steps FIRST to MIDDLE: every blocking call by source line (torch.cuda.set_sync_debug_mode). Steps MIDDLE to
LAST: the share of the time in which a kernel or a copy runs. The last line is JSON. On a CPU no call blocks,
and the operators of the CPU are used instead of kernels.
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
            if "synchroniz" in str(each.message)
        )
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in self.profile.events()
            if str(event.device_type).endswith("CUDA" if self.is_gpu else "CPU")
        )
        busy = reached = 0.0  # microseconds
        for start, end in spans:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        steps = self.last - self.middle
        return {
            "waits_per_step": places.total() / (self.middle - self.first),
            "places": dict(places.most_common(12)),
            "ms_per_step": 1000 * self.seconds / steps, "kernels_per_step": len(spans) / steps,
            "busy": busy / 1e6 / self.seconds,
        }  # fmt: skip


def main() -> None:
    watch = Watch(*map(int, sys.argv[1].split(",")))
    is_finite = Checkpointer.accepts

    def counted(self: Checkpointer, loss: torch.Tensor) -> bool:
        watch.count()
        return is_finite(self, loss)

    Checkpointer.accepts = counted
    sys.argv = sys.argv[2:]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(json.dumps(watch.summary(seen)))


if __name__ == "__main__":
    main()
