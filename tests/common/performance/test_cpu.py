"""Our convolution equals torch's, except for rounding, at every size of map and in every precision."""

import copy

import pytest
import torch

from common.performance.cpu import Conv2d, take_over

CASES = [  # inputs, outputs, kernel, stride, padding, height, width
    (8, 16, 3, 1, 1, 1, 1), (8, 16, 3, 2, 1, 2, 2), (8, 16, 3, 1, 1, 2, 2), (8, 16, 3, 2, 1, 3, 4),
    (8, 16, 1, 2, 0, 2, 2), (8, 16, 3, 1, 1, 4, 4), (8, 16, 3, 2, 1, 8, 7), (8, 16, 5, 1, 2, 7, 7),
    (8, 16, 1, 1, 0, 7, 7), (3, 8, 3, 1, 1, 12, 9), (8, 16, (1, 3), (2, 1), (0, 1), 4, 3),
]  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_torch(case, dtype, bound, layout):
    torch.manual_seed(0)
    inputs, outputs, kernel, stride, padding, height, width = case
    ours = Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False).double()
    theirs = torch.nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False).double()
    ours = ours.to(memory_format=layout)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(6, inputs, height, width, dtype=torch.float64).to(memory_format=layout)
    found = []
    for module, precision in ((ours, dtype), (theirs, torch.float64)):
        module, given = module.to(precision), images.to(precision).requires_grad_()
        output = module(given)
        (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
        found.append([output.detach(), given.grad, module.weight.grad])
    for name, own, other in zip(("output", "images", "weight"), *found, strict=True):
        assert own.shape == other.shape and own.dtype == dtype, name
        assert (own.double() - other).norm() <= bound * other.norm(), name


def test_autocast_computes_in_bfloat16_and_keeps_the_gradients_precision():
    torch.manual_seed(0)
    module = Conv2d(8, 16, 3, padding=1, bias=False)
    for size in (1, 4, 9):  # one for each of the three algorithms
        images = torch.randn(4, 8, size, size, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = module(images)
        output.float().sum().backward()
        assert (output.dtype, images.grad.dtype, module.weight.grad.dtype) == (
            torch.bfloat16, torch.float32, torch.float32,
        )  # fmt: skip


def test_without_gradients_it_is_torchs_own():
    module, images = Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(4, 8, 2, 2)
    with torch.no_grad():
        assert torch.equal(module(images), torch.nn.functional.conv2d(images, module.weight, padding=1))
    module.weight.requires_grad_(False)
    module(images.requires_grad_()).sum().backward()
    assert images.grad is not None and module.weight.grad is None


@pytest.mark.parametrize("shape", [(0, 8, 1, 1), (0, 8, 4, 4), (8, 2, 2)], ids=str)
def test_no_images_and_one_without_a_batch(shape):
    module = Conv2d(8, 16, 3, padding=1, bias=False)
    images = torch.randn(shape, requires_grad=True)
    output = module(images)
    expected = torch.nn.functional.conv2d(images, module.weight, padding=1)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert images.grad.shape == images.shape and module.weight.grad.shape == module.weight.shape


def test_a_network_that_is_taken_over_computes_the_same():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    theirs = torchvision.models.get_model("regnet_y_400mf", num_classes=5).double()  # with groups
    ours = copy.deepcopy(theirs)
    take_over(ours)
    kinds = {type(module) for module in ours.modules()}
    assert Conv2d in kinds and torch.nn.Conv2d in kinds
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    for model in (theirs, ours):
        model(images).square().sum().backward()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-8, atol=1e-8)
