"""Steps whose loss or gradient is not finite: noticed on any process, left out on all.

With a fused optimizer the device itself leaves such a step out, as torch's own gradient scaler has it do
(`found_inf`), and the host hears of it one step later, so the device always has a step's work ahead of it.
With any other the host decides before the step, and the device waits for it.
"""

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """On one step, the same on every process. bad: it was, or must be, left out; asked, late: what any
    process said; loss and norm (of the gradients): scalars of this process."""

    bad: bool
    asked: bool
    late: bool
    loss: torch.Tensor
    norm: torch.Tensor


class Guard:
    """model: its BatchNorm statistics are those of before a step that is left out. optimizer: one of
    parameters on a GPU becomes a fused one, where torch has that."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.ahead = _fused(optimizer)  # whether the host decides nothing, and hears one step later
        self._outstanding: tuple | None = None
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            self._buffers.setdefault(buffer.dtype, []).append(buffer)
        self._good = {dtype: _flat(buffers) for dtype, buffers in self._buffers.items()}

    def check(self, loss: torch.Tensor, asked: bool, late: bool) -> Verdict | None:
        """After backward(), on every process: the verdict on this step; if `ahead`, that on the step before
        (None: there was none), and this one is taken or left out by the optimizer itself. loss: scalar."""
        before = self.settle()
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).sum()
        signs = torch.stack([~torch.isfinite(norm + loss.detach()), _flag(asked, norm), _flag(late, norm)])
        signs = signs.float()
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(signs, torch.distributed.ReduceOp.MAX)
        self._keep(signs[0] > 0)
        heard = None
        if self.ahead:
            self.optimizer.found_inf = signs[0].clone()
            if signs.is_cuda:
                signs = signs.to("cpu", non_blocking=True)
                heard = torch.cuda.Event()
                heard.record()
        self._outstanding = signs, heard, loss.detach(), norm
        return before if self.ahead else self.settle()

    def settle(self) -> Verdict | None:
        """The verdict on the last step where it is still outstanding; waits for it."""
        if self._outstanding is None:
            return None
        signs, heard, loss, norm = self._outstanding
        self._outstanding = None
        if heard:
            heard.synchronize()
        return Verdict(*(sign > 0 for sign in signs.tolist()), loss, norm)

    @torch.no_grad()
    def _keep(self, bad: torch.Tensor) -> None:
        """Statistics of a good step are kept, those of a bad one exchanged for the last good ones: decided on
        the device, in a few operations for all layers."""
        for dtype, buffers in self._buffers.items():
            self._good[dtype] = torch.where(bad, self._good[dtype], _flat(buffers))
            parts = self._good[dtype].split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _flag(value: bool, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=torch.bool, device=like.device)


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is fused, by the user's wish or now, and leaves out steps by itself."""
    groups = optimizer.param_groups
    if "fused" not in optimizer.defaults:  # another kind; SGD before torch 2.3
        return False
    if any(group.get("momentum") and group.get("dampening") for group in groups):
        return False  # where torch's first step is left out, momentum stays unset, and 0 is not the same here
    if all(group["fused"] for group in groups):
        _begin(optimizer)
        return True
    parameters = [parameter for group in groups for parameter in group["params"]]
    if any(group["fused"] is False or group["foreach"] or group.get("differentiable") for group in groups):
        return False
    if not all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters):
        return False
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    for group in groups:
        group["fused"] = True
    optimizer.load_state_dict(optimizer.state_dict())  # Adam's counts of steps go to the GPU
    _begin(optimizer)
    return True


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Momentum that begins at 0: torch leaves it unset where the very first step is left out. A first step of
    momentum 0 is the same: momentum x 0 + gradient."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, torch.optim.SGD) or not group["momentum"]:
            continue
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
