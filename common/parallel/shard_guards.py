"""Refuse a model or a criterion whose results depend on the number of processes, in the first steps of a run.

The sums of exact_shards.py are equal on any number of processes if a shard is a function of the weights, the
buffers, the inputs and the random numbers of the step. State between two calls is in buffers of the model,
the criterion and the other modules of the Checkpointer: each shard begins with them. Other state, as of a
model that counts its calls, is outside. In the first two steps the first call of each of these modules is
repeated at the end of the step, with other shards in between and on every process. What this does not see,
such as a variable of a criterion that is a function, shows in `launch prove` with more processes.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from common.parallel.repeated_calls import Recorder, digest_results

_CHECKED = 2  # steps: a repeated call takes as long as the first one


class Guards:
    """Repeats the first calls of modules in the first steps. Shards calls it on every rank.

    forward: the DistributedDataParallel.
    """

    def __init__(self, forward: Any):
        self._forward = forward
        self._steps = 0  # that have ended
        self._calls: dict[str, tuple[torch.nn.Module, Recorder]] = {}  # name -> module, its first call
        self._results: dict[str, dict[str, int]] = {}  # name -> digests of the first call in this step
        self._watch("the model", forward, forward.module)

    def watch(self, modules: dict[str, torch.nn.Module]) -> None:
        """Check these modules too, before the first step. modules: name -> module of the Checkpointer."""
        # a call of the model repeats its parts: only other modules need a record of their own
        parts_of_model = {self._forward, *self._forward.module.modules()}
        for name, module in modules.items():
            if module not in parts_of_model:
                self._watch(name, module, module)

    def _watch(self, name: str, hooked: torch.nn.Module, module: torch.nn.Module) -> None:
        def keep(output: Any) -> None:
            self._results[name] = digest_results(module, output)

        self._calls[name] = module, Recorder(hooked, module, keep)

    @property
    def is_checked(self) -> bool:
        """Return whether calls are recorded in this step, for repeat_calls()."""
        return self._steps < _CHECKED

    def begin_step(self, sources: list[Any]) -> None:
        """Begin a step before its first forward pass. sources: the generators of random numbers."""
        if self.is_checked:
            for _, recorder in self._calls.values():
                recorder.expect(sources)

    def end_step(self) -> None:
        """End a step when its gradients are complete on this rank."""
        self._steps += 1

    def repeat_calls(self, restore_buffers: Callable[[], None]) -> None:
        """Repeat rank 0's first call of each module. All ranks raise BadInput if a result differs on any.

        It is called on every rank in a checked step, after the backward pass of the rank's last shard and
        before the gradients are added over the ranks. The ranks wait for each other here.
        restore_buffers: sets the buffers to their values before the step.
        """
        sent = {name: (recorder.inputs, recorder.states) for name, (_, recorder) in self._calls.items()}
        sent_by_first, expected = ranks.broadcast_object((sent, self._results))
        differences: list[str] = []
        for name, (module, recorder) in self._calls.items():
            restore_buffers()
            inputs, states = sent_by_first[name]
            repeated = recorder.repeat(inputs, states, functools.partial(digest_results, module))
            recorder.forget()
            first = expected.get(name)
            if not first or not repeated:
                continue
            for part, digest in repeated.items():
                if digest != first.get(part):
                    differences.append(f"{name}: {part}")
        self._results = {}
        # on all ranks: one that continued would wait for the others in the next collective
        gathered = list(itertools.chain(*ranks.gather_objects(differences)))
        if gathered:
            raise BadInput(
                f"--exact_shards: {gathered[0]} changes if a shard is computed again after others or on "
                "another process: expected state between two calls only in buffers (register_buffer) of "
                "the model, the criterion and other objects of the Checkpointer, with which each shard begins"
            )
