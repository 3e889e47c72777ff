"""The moving average of the weights does not count skipped steps, for any reason of the skip."""

import pytest
import torch

from bootfile.exact.nonfinite import Guard
from common.compute.averaging import MovingAverage

pytestmark = pytest.mark.rounding


def _train(skipped, **options):
    """Return the average and the model after eight steps. skipped: steps whose loss is not finite. options:
    of the optimizer; torch 2.1 does not know `fused`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    guard, average = Guard(model, optimizer), MovingAverage(model, 0.9)
    for step in range(8):
        images = torch.full((4, 3), float("nan")) if step in skipped else torch.randn(4, 3)
        loss = (model(images) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if guard.vote(loss):
            optimizer.step()
            average.update_parameters(model, guard.found_inf)
        guard.end_step()
    return average, model


@pytest.mark.skipif(torch.__version__ < "2.4", reason="no fused optimizer on the CPU before torch 2.4")
@pytest.mark.parametrize("skipped", [(), (3,), (0, 5)])
def test_a_skipped_step_is_not_averaged(skipped):
    (ours, model), (theirs, _) = _train(skipped, fused=True), _train(skipped)
    assert ours.n_averaged == theirs.n_averaged == 8 - len(skipped)
    counts = [name for name, tensor in ours.state_dict().items() if not tensor.is_floating_point()]
    assert len(counts) == 2  # n_averaged and num_batches_tracked
    for name, tensor in ours.state_dict().items():
        if name not in counts:
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)
    assert ours.module[1].num_batches_tracked == model[1].num_batches_tracked


def test_where_the_host_decides_it_is_the_average_of_torch():
    ours, _ = _train(())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.optim.swa_utils.AveragedModel(model).load_state_dict(ours.state_dict())  # the same names
    moved = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    theirs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=moved, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(8):
        loss = (model(torch.randn(4, 3)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.update_parameters(model)
    counter = "module.1.num_batches_tracked"  # torch averages this number, too
    names = theirs.state_dict().keys() - {counter}
    assert all(torch.equal(theirs.state_dict()[name], ours.state_dict()[name]) for name in names)
    assert ours.state_dict()[counter] == 8


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize(
    "norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm], ids=["old", "new"]
)
def test_the_vectors_of_a_spectral_norm_are_copied(norm, is_on_device):
    """The mean of unit vectors is shorter than 1: the average would be divided by a wrong norm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        norm(torch.nn.Linear(8, 8)), torch.nn.BatchNorm1d(8), norm(torch.nn.Linear(8, 1))
    )
    average = MovingAverage(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found_inf = torch.zeros(()) if is_on_device else None
    for _ in range(20):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model, found_inf)
    ours = dict(average.module.named_buffers())
    copied = [name for name, value in model.named_buffers() if torch.equal(value, ours[name])]
    assert set(ours) - set(copied) == {"1.running_mean", "1.running_var"}
    vectors = [value for value in ours.values() if value.ndim == 1 and value.numel() > 1 and value.min() < 0]
    assert len(vectors) > 1
