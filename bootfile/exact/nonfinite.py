"""Find steps whose loss or gradient is not finite on any rank, and skip them on every rank.

With a fused optimizer the device itself skips the step, as with torch's GradScaler (`found_inf`). The host
reads the result one step later, so the device never waits for the host. With any other optimizer the host
decides before the step, and the device waits.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bootfile.exact import dtensors
from bootfile.exact.optimizer_steps import parameters_of
from bootfile.ground import accelerator, errors
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

if TYPE_CHECKING:
    from bootfile.exact.protocols import Watcher


class Diverged(BadInput):
    """Too many consecutive steps whose loss or gradient was not finite."""

    code = errors.DIVERGED


class Verdict(NamedTuple):
    """The result of one step."""

    bad: bool  # an optimizer step was skipped, or must be skipped; the same on every rank
    loss: float  # loss of this rank, if it or a gradient was not finite; else NaN
    norm: float  # the same of the gradients


class _Check(NamedTuple):
    """One loss of a step."""

    # float32 [1 + n], over all ranks: 1 if the loss or a gradient is not finite, the numbers of the watchers
    signs: torch.Tensor
    loss: torch.Tensor  # [] of this process
    norm: torch.Tensor  # [] of this process


class _Outstanding(NamedTuple):
    """A step whose verdict the host has not read."""

    signs: torch.Tensor  # as in _Check, over all losses of the step
    arrived: Any  # an event of the device after which they are on the host; None if they are there
    checks: list[_Check]


class Guard:
    """Finds non-finite steps on any rank, and asks the watchers' questions with the same collective.

    model: a step that is skipped does not change its BatchNorm statistics.
    optimizers: if all are fused, the host does not wait for the device (`ahead`).
    watchers: plugins (plugins.py), asked in this order; their numbers travel in one all_reduce.
    `has_more`: more parameters than ever had a gradient in this step.
    """

    _hooks: Sequence[Any] = ()  # a process has one run

    def __init__(
        self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer, watchers: "Sequence[Watcher]" = ()
    ):
        # each gets an attribute `found_inf`, as from torch's GradScaler
        self.optimizers: tuple[Any, ...] = optimizers
        self.ahead = all(map(_is_fused, optimizers))  # whether the device decides; the host learns it later
        self.found_inf: torch.Tensor | None = None  # for the next optimizer step: float [], 1 to skip it
        for hook in Guard._hooks:  # left by an earlier run in this process, as in a notebook
            hook.remove()
        hooks = []
        # the hook runs in each optimizer.step(), where a GradScaler may have set its own `found_inf`
        if self.ahead:
            for optimizer in optimizers:
                _set_momentum(optimizer)
                hooks.append(optimizer.register_step_pre_hook(self._keep_found_inf))
        self._hooks = Guard._hooks = hooks
        self._watchers = watchers
        self._sizes: list[int] = []  # how many numbers each watcher has sent
        self._statistics = _Statistics(model)
        self._checks: list[_Check] = []  # the losses of this step so far
        self._outstanding: _Outstanding | None = None
        self.has_more = False
        self._most = 0  # parameters that had a gradient in a step so far
        # stands for the loss, the norm and the sign if the loop gives no loss
        self._zero = torch.zeros((), device=accelerator.device_of(model))

    def close(self) -> None:
        """Let the optimizers take each step again: those after the run are not part of it."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self.optimizers:
            vars(optimizer).pop("found_inf", None)  # the last step of the run may have been a bad one

    @property
    def has_voted(self) -> bool:
        """Return whether vote() was called in this step."""
        return bool(self._checks)

    def vote(self, loss: torch.Tensor | None) -> bool:
        """Vote on a loss of a step after its backward(), on every rank, and return whether to take the
        optimizer step. If `ahead`, the answer is True: the optimizer itself takes or skips the step.
        loss: scalar; None: only ask the watchers' questions.
        """
        all_parameters = itertools.chain.from_iterable(map(parameters_of, self.optimizers))
        parameters = [parameter for parameter in all_parameters if parameter.grad is not None]
        if len(parameters) > self._most:  # also in the first step
            self.has_more = True
            self._most = len(parameters)
        norm = self._zero
        sign = self._zero  # 1 if the loss or a gradient is not finite
        if loss is None:
            loss = self._zero
        else:
            loss = loss.detach().squeeze()  # a loss [1] is a scalar, too
            # one sum shows whether any gradient is infinite or NaN, in one pass on the device
            if parameters:
                gradients = [dtensors.local(parameter.grad) for parameter in parameters]
                norm = torch.stack(torch._foreach_norm(gradients)).sum()
            sign = (~torch.isfinite(norm + loss)).float()
        signs = self._ask_all_ranks(sign)
        self._checks.append(_Check(signs, loss, norm))
        # the answer stays on the device, which skips the step itself: the host continues to launch work
        if self.ahead:
            self._statistics.judge_loss(signs[0] > 0)
            # a loss may be checked before another one's optimizer step
            self.found_inf = torch.stack([check.signs[0] for check in self._checks]).amax(0)
            for optimizer in self.optimizers:
                optimizer.found_inf = self.found_inf
            return True
        is_bad = signs[0].item() > 0  # the host waits for the device here
        self._statistics.judge_loss(is_bad)
        if is_bad:
            for parameter in parameters:  # an accumulation would keep what is not finite
                parameter.grad = None
        return not is_bad

    def _ask_all_ranks(self, sign: torch.Tensor) -> torch.Tensor:
        """Return the signs of a _Check. sign: float [], 1 if the step is bad here. The host does not wait."""
        numbers = [watcher.numbers() for watcher in self._watchers]
        self._sizes = [len(answer) for answer in numbers]
        # one tensor for all questions, so one collective in a step; MAX: one rank that says yes is enough
        signs = _join(sign, numbers)
        if ranks.world_size() > 1:
            with ranks.waiting():
                torch.distributed.all_reduce(signs, torch.distributed.ReduceOp.MAX)
        return signs

    def _keep_found_inf(self, optimizer: Any, *_: object) -> None:
        """Make the optimizer skip the step if this class or a GradScaler found a value that is not finite.
        A scaler sees the gradients of its process only."""
        if self.found_inf is not None:
            # torch calls this before the step: a scaler has set its answer by now
            of_scaler = getattr(optimizer, "found_inf", None)
            both = self.found_inf if of_scaler is None else torch.maximum(of_scaler, self.found_inf)
            optimizer.found_inf = both

    def end_step(self) -> Verdict | None:
        """End a step, after all its backward() calls, on every rank. Return the verdict on this step or, if
        `ahead`, on the step before; None if there is none."""
        if not self._checks:
            return None
        ended = self._gather()
        # the signs of the step before were sent to the host a step ago, so this rarely waits for the device
        verdict = self.settle() if self.ahead else None
        self._outstanding = ended
        return verdict if self.ahead else self.settle()

    def _gather(self) -> _Outstanding:
        """Return the step that ends, with the signs of all its losses, which are sent to the host."""
        checks = self._checks
        self._checks = []
        signs = checks[0].signs
        if len(checks) > 1:  # one bad loss makes the step a bad one
            signs = torch.stack([check.signs for check in checks]).amax(0)
            self._statistics.judge_loss(signs[0] > 0)
        self._statistics.end_step()
        arrived = None
        if self.ahead and accelerator.has_streams(signs.device):
            # copied in the background: the event says when the host may read it
            arrived = accelerator.new_event(signs.device)
            signs = signs.to("cpu", non_blocking=True)
            arrived.record()
        return _Outstanding(signs, arrived, checks)

    def settle(self) -> Verdict | None:
        """Wait, on every rank, for the verdict on the last step, let the watchers judge it, and return it;
        None if it was returned before. Raises what a watcher raises."""
        if self._outstanding is None:
            return None
        signs, arrived, checks = self._outstanding
        self._outstanding = None
        if arrived:
            arrived.synchronize()
        # the numbers of the watchers follow in the order in which they were asked
        bad, *maxima = signs.tolist()
        for watcher, size in zip(self._watchers, self._sizes, strict=True):
            watcher.judge(maxima[:size])
            maxima = maxima[size:]
        if not bad:
            return Verdict(False, math.nan, math.nan)
        # the first of several losses that was not finite is reported
        worst = max(checks, key=lambda check: check.signs[0].item())
        return Verdict(True, worst.loss.item(), worst.norm.item())


def _join(sign: torch.Tensor, numbers: Sequence[list[float] | torch.Tensor]) -> torch.Tensor:
    """Return the sign and the numbers of all watchers in one tensor, float32 [1 + n]. The host does not wait
    for a device."""
    # on a CPU through a list: each operation on tensors takes longer than copying these few numbers
    if sign.device.type == "cpu":
        values = [sign.item()]
        for answer in numbers:
            values += answer.tolist() if isinstance(answer, torch.Tensor) else answer
        return torch.tensor(values, dtype=torch.float32)
    parts = [sign[None]]
    for answer in numbers:
        if isinstance(answer, torch.Tensor):
            parts.append(answer.float())
            continue
        # torch.full() is a kernel; a copy from the host could wait for the device
        parts.extend(torch.full((1,), number, dtype=torch.float32, device=sign.device) for number in answer)
    return torch.cat(parts)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is fused, and so can skip a step by itself (`found_inf`)."""
    # all groups: one that is not fused would take the step all the same
    groups = optimizer.param_groups
    if "fused" not in optimizer.defaults or not all(group["fused"] for group in groups):
        return False
    # if torch's first step is skipped, momentum stays unset, and with dampening 0 is not the same
    return not any(group.get("momentum") and group.get("dampening") for group in groups)


def _set_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set the initial momentum to 0: torch leaves it unset if the very first step is skipped."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, torch.optim.SGD) or not group["momentum"]:
            continue
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


class _Statistics:
    """The buffers of a model, and their values after the last good step.

    A forward pass changes the statistics of BatchNorm, also if its loss is not finite.
    """

    def __init__(self, model: torch.nn.Module):
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            # `.data`: autograd must not see that a buffer is written between two backward() calls of a step.
            # In training BatchNorm's backward() does not read it
            self._buffers.setdefault(buffer.dtype, []).append(buffer.data)
        # dtype -> the values of all buffers in one tensor
        self._values_of_step = {dtype: _flat(buffers) for dtype, buffers in self._buffers.items()}
        self._values_of_loss = self._values_of_step

    @torch.no_grad()
    def judge_loss(self, is_bad: torch.Tensor | bool) -> None:
        """Keep the buffers after a good loss; after a bad one, restore those of the last step. is_bad: a
        bool, or a tensor [] of the device; then the host does not wait for it."""
        self._values_of_loss = {}
        for dtype, buffers in self._buffers.items():
            last = self._values_of_step[dtype]
            if is_bad is False:
                self._values_of_loss[dtype] = _flat(buffers)
                continue
            values = last if is_bad is True else torch.where(is_bad, last, _flat(buffers))
            self._values_of_loss[dtype] = values
            parts = values.split([buffer.numel() for buffer in buffers])
            shaped = [part.view_as(buffer) for buffer, part in zip(buffers, parts, strict=True)]
            copy_all(buffers, shaped)

    def end_step(self) -> None:
        """End a step: a later bad loss restores the values that the buffers have now."""
        self._values_of_step = self._values_of_loss


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes."""
    if hasattr(torch, "_foreach_copy_"):  # not in torch 2.1
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])
