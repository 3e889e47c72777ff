"""Find steps whose loss or gradient is not finite on any rank, and skip them on every rank.

With a fused optimizer the device itself skips the step, as with torch's GradScaler (`found_inf`). The host
reads the result one step later, so the device never waits for the host. With any other optimizer the host
decides before the step, and the device waits.
"""

import math
from typing import Any, NamedTuple

import torch

from bootfile.exact import dtensors
from bootfile.ground import accelerator, errors
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks


class Diverged(BadInput):
    """Too many consecutive steps whose loss or gradient was not finite."""

    code = errors.DIVERGED


class Verdict(NamedTuple):
    """The result of one step. The flags are the same on every rank.

    bad: an optimizer step was skipped, or must be skipped.
    asked, late, report, changed: true if the flag was set on any rank; see Guard.vote().
    loss, norm (of the gradients): floats of this process, for a loss that was not finite; else NaN.
    digests: the largest of each number in Guard.digests over all ranks.
    """

    bad: bool
    asked: bool
    late: bool
    report: bool
    changed: bool
    loss: float
    norm: float
    digests: list[float]


class Guard:
    """Finds non-finite steps on any rank.

    model: a step that is skipped does not change its BatchNorm statistics. optimizers: if all are fused, the
    host does not wait for the device (`ahead`).

    Attributes:
    digests: float32 [n], sent with the flags of the next step, for its verdict.
    has_more: whether more parameters than ever had a gradient in this step.
    """

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer):
        self.model = model
        # each gets an attribute `found_inf`, as from torch's GradScaler
        self.optimizers: tuple[Any, ...] = optimizers
        self.ahead = all(map(_is_fused, optimizers))  # whether the device decides; the host learns it later
        self.found_inf: torch.Tensor | None = None  # for the next optimizer step: float [], 1 to skip it
        if self.ahead:
            for each in optimizers:
                _set_momentum(each)
                each.register_step_pre_hook(self._keep_found_inf)
        self._checks: list[tuple[torch.Tensor, ...]] = []  # (signs, loss, norm) of each loss of this step
        self._outstanding: tuple[Any, ...] | None = None
        self.digests = torch.zeros(0)
        self.has_more, self._most = False, 0
        self._nothing = torch.zeros((), device=next((each.device for each in model.parameters()), None))
        # `.data`: between two backward() calls of a step, autograd must not see that a buffer is written;
        # in training BatchNorm's backward() does not read it
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            self._buffers.setdefault(buffer.dtype, []).append(buffer.data)
        # their values after the last good step, and after the last loss
        self._good = self._kept = {dtype: _flat(buffers) for dtype, buffers in self._buffers.items()}

    @property
    def has_voted(self) -> bool:
        """Return whether vote() was called in this step."""
        return bool(self._checks)

    def vote(
        self, loss: torch.Tensor | None, asked: bool, late: bool, report: bool = False, changed: bool = False
    ) -> bool:
        """Vote on a loss of a step after its backward(), on every rank, and return whether to take the
        optimizer step. If `ahead`, the answer is True: the optimizer itself takes or skips the step.

        loss: scalar; None: send only the flags, of a loop that does not ask.
        asked: whether this process was asked to stop.
        late: whether a save is due by time.
        report: whether a report is due by time.
        changed: whether other members wait for the end of a step, see members.py.
        """
        groups = [group for each in self.optimizers for group in each.param_groups]
        parameters = [each for group in groups for each in group["params"] if each.grad is not None]
        if len(parameters) > self._most:  # also in the first step
            self.has_more, self._most = True, len(parameters)
        gradients = [dtensors.local(each.grad) for each in parameters]
        if loss is None:
            loss, parameters, gradients = self._nothing, [], []
        norm = torch.stack(torch._foreach_norm(gradients)).sum() if gradients else loss.new_zeros(())
        flags = [
            torch.full((), each, dtype=torch.bool, device=norm.device)
            for each in (asked, late, report, changed)
        ]
        loss = loss.detach().squeeze()  # a loss [1] is a scalar, too
        signs = torch.stack([~torch.isfinite(norm + loss), *flags]).float()
        if len(self.digests):
            signs = torch.cat([signs, self.digests])
        if ranks.world_size() > 1:
            torch.distributed.all_reduce(signs, torch.distributed.ReduceOp.MAX)
        self._checks.append((signs, loss, norm))
        if not self.ahead:
            is_bad = signs[0].item() > 0
            self._keep(is_bad)
            for each in parameters if is_bad else ():  # an accumulation would keep what is not finite
                each.grad = None
            return not is_bad
        self._keep(signs[0] > 0)
        # a loss may be checked before another one's optimizer step
        self.found_inf = torch.stack([each[0] for each, *_ in self._checks]).amax(0)
        for each in self.optimizers:
            each.found_inf = self.found_inf
        return True

    def _keep_found_inf(self, optimizer: Any, *_: object) -> None:
        """Make the optimizer skip the step if this class or a GradScaler found a value that is not finite.

        A scaler computes `found_inf` from the gradients of its process only: it ignores the loss and the
        other ranks.
        """
        if self.found_inf is not None:
            own = getattr(optimizer, "found_inf", None)
            optimizer.found_inf = self.found_inf if own is None else torch.maximum(own, self.found_inf)

    def end_step(self) -> Verdict | None:
        """End a step, after all its backward() calls, on every rank. Return the verdict on it; if `ahead`,
        that on the previous step. None before the first, and if no loss was checked since the last call."""
        if not self._checks:
            return None
        (signs, *_), *others = checks = self._checks
        self._checks, self.digests = [], torch.zeros(0)
        if others:  # one bad loss makes the step a bad one
            signs = torch.stack([each for each, *_ in checks]).amax(0)
            self._keep(signs[0] > 0)
        self._good = self._kept
        before, arrived = self.settle(), None
        if self.ahead and accelerator.has_streams(signs.device):
            arrived = accelerator.new_event(signs.device)
            signs = signs.to("cpu", non_blocking=True)
            arrived.record()
        self._outstanding = signs, arrived, checks
        return before if self.ahead else self.settle()

    def settle(self) -> Verdict | None:
        """Wait for the verdict on the last step and return it; None if it was returned before."""
        if self._outstanding is None:
            return None
        signs, arrived, checks = self._outstanding
        self._outstanding = None
        if arrived:
            arrived.synchronize()
        flags, digests = signs[:5].tolist(), signs[5:].tolist()
        bad, asked, late, report, changed = (flag > 0 for flag in flags)
        loss = norm = math.nan
        if bad:
            worst = max(checks, key=lambda check: check[0][0].item())
            loss, norm = worst[1].item(), worst[2].item()
        return Verdict(bad, asked, late, report, changed, loss, norm, digests)

    @torch.no_grad()
    def _keep(self, bad: torch.Tensor | bool) -> None:
        """Keep BatchNorm's statistics after a good loss, and restore those of the last good step after a bad
        one.

        bad: a tensor if the device decides, in a few operations for all layers.
        """
        self._kept = {}
        for dtype, buffers in self._buffers.items():
            if bad is False:
                self._kept[dtype] = _flat(buffers)
                continue
            good = self._good[dtype]
            kept = good if bad is True else torch.where(bad, good, _flat(buffers))
            self._kept[dtype] = kept
            parts = kept.split([buffer.numel() for buffer in buffers])
            _copy_all(buffers, [part.view_as(each) for each, part in zip(buffers, parts, strict=True)])


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if hasattr(torch, "_foreach_copy_"):  # not in torch 2.1
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is fused, and so can skip a step by itself (`found_inf`)."""
    groups = optimizer.param_groups
    if "fused" not in optimizer.defaults or not all(group["fused"] for group in groups):
        return False
    # if torch's first step is skipped, momentum stays unset, and with dampening 0 is not the same
    return not any(group.get("momentum") and group.get("dampening") for group in groups)


def _set_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set the initial momentum to 0: torch leaves it unset if the very first step is skipped. The first step
    does not change: momentum x 0 + gradient."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, torch.optim.SGD) or not group["momentum"]:
            continue
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
