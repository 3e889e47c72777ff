"""By what a loss divides: over all samples, or over the weights of their labels."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

_NAMES = ("cross_entropy", "nll_loss", "linear_cross_entropy")  # the last one since torch 2.12
_OF_LABELS: dict[Any, inspect.Signature] = {
    getattr(functional, name): inspect.signature(getattr(functional, name))
    for name in _NAMES
    if hasattr(functional, name)
}
_IS_MEAN = ["mean", None, None]  # the last two are the former names
_NODES = 50  # nodes that are searched in the graph of an output


class LabelMean(TorchFunctionMode):
    """Sees by what cross_entropy(), nll_loss() and linear_cross_entropy() divide, also in torch.nn's modules.

    `loss`: the last result that is a mean and requires no gradient, or None. It is `total` / `divisor`,
    float64 []; the divisor is the sum of the weights of the labels that are not ignored. `labels`: the number
    of all labels.
    """

    loss: torch.Tensor | None = None
    _is_watching = False
    _is_paused = False
    _is_other: torch.Tensor | None = None  # bool []: whether a divisor since watch() was not `labels`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this for each function of torch while the mode is on: most are none of the three
        result = func(*args, **(kwargs or {}))
        if func in _OF_LABELS:
            bound = _OF_LABELS[func].bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = bound.arguments
            # a sum, or one loss for each sample, is divided by the loop itself: nothing is known of it
            if [given.get(name) for name in ("reduction", "reduce", "size_average")] == _IS_MEAN:
                self.labels, self.divisor = _count_labels(**given)
                # in training only whether the divisor is another one counts; an evaluation needs the total
                if result.requires_grad:
                    self._note(self.divisor != self.labels)
                    return result
                self.loss = result
                if given["weight"] is None:
                    self.total = torch.where(self.divisor > 0, accelerator.double(result) * self.divisor, 0.0)
                else:  # with label smoothing a total is not 0 if all weights are
                    self.total = accelerator.double(func(**given | {"reduction": "sum"}))
        return result

    def watch(self, output: Any) -> None:
        """See the losses of this thread until stop(). output: of the model; it may hold a loss already."""
        self.resume()
        if not torch.is_grad_enabled():
            return
        # a model may return its loss: it was computed inside the forward pass, which the mode has not seen
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 0:
                for node in _find_means(leaf):
                    self._note(node._saved_total_weight != node._saved_target.numel())
        if not self._is_watching:
            self._is_watching = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        """See no losses until resume(): torch.compile() compiles a function again if it is called with a mode
        that was not there at the first time."""
        if self._is_watching and not self._is_paused:
            self._is_paused = True
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        """See losses again after pause()."""
        if self._is_paused:
            self._is_paused = False
            self.__enter__()  # type: ignore[no-untyped-call]

    def _note(self, is_other: torch.Tensor) -> None:
        if self._is_other is not None:  # a loss before it, in the same step
            is_other = self._is_other | is_other
        self._is_other = is_other

    def stop(self, device: torch.device) -> torch.Tensor:
        """See no more losses until the next watch(). Return whether a loss with a gradient since the last one
        was not a mean over samples: float32 [1] on the device, 1 or 0, without synchronising."""
        # a tensor on the device: the answer travels with the vote, and the host does not wait
        is_other = self._is_other
        self.forget()
        if is_other is None:
            return torch.zeros(1, device=device)
        return is_other.float().to(device)[None]

    def forget(self) -> None:
        """See no more losses until the next watch(), and forget those since the last one."""
        self._is_other = None
        self.pause()
        self._is_watching = False
        self._is_paused = False


def _find_means(loss: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of nll_loss() with reduction="mean" in the graph of a loss, before its backward()."""
    # breadth first, and only the first nodes: a loss is near the output, and a whole graph has thousands
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:  # grows
        if node is None:
            continue
        if node.name().startswith("NllLoss") and node._saved_reduction == 1:  # the mean
            yield node
        if len(nodes) < _NODES:
            nodes += [following for following, _ in node.next_functions]


def _count_labels(target: torch.Tensor, weight: Any, ignore_index: int | None, **_: Any) -> Any:
    """Return the number of labels, and the sum of the weights of those that are not ignored, float64 []."""
    if target.is_floating_point():  # shares of the classes: each sample counts 1, whatever the weights
        samples = target.numel() // target.shape[min(1, target.ndim - 1)]
        return samples, accelerator.double(torch.full((), samples, device=target.device))
    if ignore_index is None:
        ignore_index = -100  # the default of torch
    is_counted = target != ignore_index
    if weight is None:
        return target.numel(), accelerator.double(is_counted.sum())
    # an ignored label, such as -100, is not an index of the weights: 0 takes its place
    of_labels = weight[target.where(is_counted, 0)].where(is_counted, 0)
    return target.numel(), accelerator.double(of_labels).sum()


class LabelMeanWatcher(Plugin):
    """Asks whether a loss of any rank was not a mean over samples: gradients that ranks or shards average are
    not those of one batch then. With exact shards such a loss is refused, else warned of."""

    def __init__(self) -> None:
        self._seen = LabelMean()

    def begin(self, parts: Parts, step: int) -> None:
        """See the losses between a forward pass and the vote. The pass itself is not seen: a loss in its
        output is found by its graph."""
        self._device = accelerator.device_of(parts.model)  # it has the answer
        self._has_shards = parts.shards is not None
        self._say_once = parts.say_once
        # two modules: torch.compile() must not see the mode, and DistributedDataParallel is outside of it
        module = forward = parts.forward
        if isinstance(forward, torch.nn.parallel.DistributedDataParallel):
            module = forward.module  # perhaps a compiled one, which exact shards also call by itself
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward)
        forward.register_forward_hook(self._watch_forward)

    # torch calls these three before and after each forward pass, on each rank.

    def _begin_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._seen.pause()

    def _end_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._seen.resume()

    def _watch_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._seen.watch(output)

    def numbers(self) -> torch.Tensor:
        return self._seen.stop(self._device)

    def judge(self, maxima: list[float]) -> None:
        if maxima[0] > 0:
            self._refuse()

    def _refuse(self) -> None:
        """Raise BadInput, or print one warning without exact shards: a loss is not a mean over samples."""
        line = (
            "the loss is not a mean over samples (it divides by the weights of the labels, or labels are "
            "ignored): the gradients that "
        )
        # shards promise the bits of one process, so this ends the run; other jobs are only warned
        if self._has_shards:
            raise BadInput(
                f"--exact_shards: {line}are averaged over shards are not those of one batch. Expected a mean "
                "over samples, as (loss_of_each_sample * weight_of_its_label).mean()"
            )
        self._say_once(
            f"warning: {line}{ranks.world_size()} processes average are not those of one process. "
            "guides/own_step.md shows a step that divides by the sum over all processes",
            "mean",
        )

    def close(self, error: BaseException | None) -> None:
        self._seen.forget()
