"""A step that is not finite is skipped by the device, in every type of weights."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bootfile import Diverged, Exact, torch_loader
from bootfile.exact.nonfinite import Guard
from bootfile.exact.plugins import Plugin
from bootfile.ground.results import checkpoints


@pytest.fixture(params=[torch.float32, torch.float64])
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


NEEDS_FUSED = pytest.mark.skipif(
    torch.__version__ < "2.4", reason="fused optimizers on a CPU came with torch 2.4"
)


@NEEDS_FUSED
@pytest.mark.parametrize("factor, is_taken", [(1.0, True), (float("nan"), False)])
def test_a_fused_optimizer_takes_what_the_guard_found(factor, is_taken, default_dtype):
    """torch's fused kernels read `found_inf` as float32, also if the weights are float64."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    guard = Guard(model, optimizer, watchers=[Plugin()])
    before = model.weight.detach().clone()
    loss = factor * model(torch.ones(1, 2)).sum()
    loss.backward()
    assert guard.vote(loss)
    optimizer.step()
    assert model.weight.dtype == default_dtype
    assert torch.equal(model.weight, before) is not is_taken


@NEEDS_FUSED
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_run_takes_its_steps_after_one_that_has_diverged_with_the_same_optimizer(is_gone, tmp_path):
    """As in a notebook: the device skipped the last step of the run before."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def train(factor):
        data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        loader = torch_loader(DataLoader(data, 4), torch.device("cpu"))
        run = Exact(str(tmp_path / str(factor)), loader, model=model, optimizer=optimizer, max_bad_steps=2)
        for _ in loader.epochs_from(run.resume()):
            for inputs, targets in loader:
                loss = factor * torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                if run.accepts(loss):
                    optimizer.step()
                optimizer.zero_grad()
                if run.end_step().save:
                    run.save()
        run.close()

    before = model.weight.detach().clone()
    with pytest.raises(Diverged):
        train(float("nan"))
    assert torch.equal(model.weight, before)
    if is_gone:
        gc.collect()
    train(1.0)
    assert not torch.equal(model.weight, before)
    # nor does the end of a run leave anything that skips a step of the loop after it
    assert not hasattr(optimizer, "found_inf")


@NEEDS_FUSED
def test_no_checkpoint_within_an_accumulation_after_a_bad_step(tmp_path):
    """The device skips the step of the batches 7 to 9, because of batch 8. The host learns it later."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    loader = torch_loader(DataLoader(data, 4), torch.device("cpu"))
    run = Exact(tmp_path, loader, model=model, optimizer=optimizer, save_every=4, keep=9)
    for _ in loader.epochs_from(run.resume()):
        for inputs, targets in loader:
            factor = float("nan") if loader.step == 8 else 1.0
            loss = factor * torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if run.accepts(loss) and loader.step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if run.end_step().save:
                run.save()
    run.close()
    assert checkpoints(str(tmp_path)) == ["step_6.pt", "step_12.pt"]
