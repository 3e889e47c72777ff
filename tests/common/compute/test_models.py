import contextlib

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.compute import classifiers, networks, recompute
from common.compute.classifiers import build, check
from common.compute.models import resnet18

pytestmark = pytest.mark.rounding


def test_parameters_of_the_seed():
    model = resnet18()
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    names = set(model.state_dict())
    assert {"conv1.0.weight", "conv2.0.residual_function.0.weight", "conv3.0.shortcut.0.weight"} <= names
    assert {"conv5.1.residual_function.4.running_var", "dense_layer.bias"} <= names
    assert not any(name.startswith("conv2.0.shortcut") for name in names)


def test_shapes():
    features = []
    model = resnet18()
    for name in ("conv1", "conv2", "conv3", "conv4", "conv5"):
        getattr(model, name).register_forward_hook(
            lambda _module, _input, output: features.append(list(output.shape))
        )
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert features == [[2, 64, 32, 32], [2, 64, 32, 32], [2, 128, 16, 16], [2, 256, 8, 8], [2, 512, 4, 4]]


def test_a_narrower_network_has_the_same_names():
    narrow = resnet18(channels=1, classes=7, width=8)
    assert sum(parameter.numel() for parameter in narrow.parameters()) < 200_000
    assert narrow.state_dict().keys() == resnet18().state_dict().keys()
    assert narrow(torch.zeros(3, 1, 8, 8)).shape == (3, 7)


@pytest.mark.parametrize(("name", "size"), [("resnet18", 64), ("vit_b_32", 64), ("googlenet", 64)])
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_classifiers_take_images_of_that_size(name, size):
    model = build(name, 3, size)
    assert all(not each.any() for each in model.buffers() if each.dtype == torch.int64), "no batch is counted"
    assert model.training and model(torch.zeros(2, 3, size, size)).shape == (2, 3)


@pytest.mark.parametrize(("name", "size"), [("vit_b_32", 65), ("maxvit_t", 100), ("alexnet", 32)])
def test_a_size_that_a_classifier_cannot_take(name, size):
    with pytest.raises(BadInput, match=f"--arch {name} cannot take images of --image_size {size}: "):
        build(name, 3, size)


@pytest.mark.parametrize(
    ("name", "size", "batch", "message"),
    [
        ("resnet18", 32, None, None), ("resnet18", 32, 2, None), ("resnet18", 64, 1, None),
        ("resnet18", 32, 1, "--arch resnet18 cannot be trained on 1 image .*--image_size 32 "),
        ("vgg11", 32, 1, None), ("regnet_x_400mf", 64, 2, None), ("alexnet", 32, 2, "cannot take images"),
        ("regnet_x_400mf", 32, 1, "cannot be trained on 1 image"),
    ],
)  # fmt: skip
def test_what_a_classifier_can_be_trained_on_is_known_before(name, size, batch, message):
    with pytest.raises(BadInput, match=message) if message else contextlib.nullcontext():
        check(name, size, batch)


def _train(arch: str, size: int, kwargs: str, checkpoints: bool) -> tuple[dict, int]:
    """Return the state after two steps, and the bytes that the forward passes kept."""
    torch.manual_seed(0)
    model = classifiers.build(arch, 3, size, kwargs)
    if checkpoints:
        recompute.checkpoint_blocks(model, arch)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.01), []
    images = torch.randn(4, 3, size, size)
    for seed in range(2):
        torch.manual_seed(seed)  # dropout draws from it
        optimizer.zero_grad()
        keep = torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda x: x)
        with keep:
            loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        output = model.eval()(images)
    return model.state_dict() | {"output": output}, sum(each.nbytes for each in kept)


@pytest.mark.parametrize(
    ("arch", "size", "kwargs"),
    [
        ("resnet18", 32, "{}"),
        ("convnext_tiny", 32, "{stochastic_depth_prob = 0.5}"),
        pytest.param("vit_b_32", 32, "{dropout = 0.5}", marks=pytest.mark.thorough),  # 86 million parameters
        ("timm:resnet10t", 32, "{drop_path_rate = 0.5}"),
        ("timm:vit_tiny_patch16_224", 32, "{drop_rate = 0.5, drop_path_rate = 0.5}"),
    ],
)
def test_computing_blocks_again_changes_no_bit(arch, size, kwargs):
    if arch.startswith(networks.TIMM):
        pytest.importorskip("timm")
    one, less = _train(arch, size, kwargs, checkpoints=True)
    other, all_kept = _train(arch, size, kwargs, checkpoints=False)
    assert one.keys() == other.keys() and torch.isfinite(one["output"]).all()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert less < 0.7 * all_kept


def test_a_network_without_blocks_is_refused():
    with pytest.raises(BadInput, match="--grad_checkpointing: alexnet has no blocks"):
        recompute.checkpoint_blocks(classifiers.build("alexnet", 3, 64), "alexnet")
