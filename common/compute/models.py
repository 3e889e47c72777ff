"""The ResNet-18 of the small jobs."""

import collections
from typing import Any

import torch
from torch import nn

from bootfile.ground.errors import BadInput

# torch.optim.SGD(..., **FUSED[device.type]): on CUDA one kernel updates all weights, and the host does not
# wait for the device to check whether a step is finite. SGD has it since torch 2.3.
FUSED = collections.defaultdict[str, dict[str, Any]](dict)
FUSED["cuda"] = {"fused": True} if torch.__version__ >= "2.3" else {}
WIDTH_HELP = "channels of the first stage: 8 for a quick test (default: 64)"
_WIDEST = 1024  # channels of the first stage


def resnet18(channels: int = 3, classes: int = 10, width: int = 64) -> nn.Module:
    """Return a ResNet-18 for small images: a 3x3 stem without pooling, four stages of two blocks.

    width: channels of the stem and the first stage; each later stage has twice those of the one before.

    Input float [N, channels, H, W], output logits [N, classes]. 11,173,962 parameters for 3 channels and 10
    classes. Their names are those of the ModelArts sample, so --weights loads its files. Source: K. He et
    al., "Deep Residual Learning for Image Recognition", CVPR 2016, with the stem of its CIFAR networks. The
    last BatchNorm of each block begins with the weight 0 (P. Goyal et al., arXiv:1706.02677): otherwise the
    first epochs of a short training evaluate worse than chance.
    """
    if width > _WIDEST:
        raise BadInput(f"--width {width} is more than {_WIDEST} channels")
    return _ResNet(channels, classes, width)


class _ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        self.conv1 = nn.Sequential(
            _convolution(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.conv2 = _stage(width, width, stride=1)
        self.conv3 = _stage(width, 2 * width, stride=2)
        self.conv4 = _stage(2 * width, 4 * width, stride=2)
        self.conv5 = _stage(4 * width, 8 * width, stride=2)
        self.dense_layer = nn.Linear(8 * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.conv5(self.conv4(self.conv3(self.conv2(self.conv1(images)))))
        return self.dense_layer(features.mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        last = nn.BatchNorm2d(outputs)
        nn.init.zeros_(last.weight)  # the block begins as its shortcut
        self.residual_function = nn.Sequential(
            _convolution(inputs, outputs, 3, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            _convolution(outputs, outputs, 3),
            last,
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual_function(features) + self.shortcut(features))


def _stage(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(_Block(inputs, outputs, stride), _Block(outputs, outputs, stride=1))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
