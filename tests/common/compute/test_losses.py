"""The losses that options choose, from their definition."""

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.compute import losses
from common.console.arguments import Parser

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 1.0, -2.0]])
LABELS = torch.tensor([0, 2])


def build(*words, has_sets=False) -> torch.nn.Module:
    parser = Parser("test")
    losses.add_arguments(parser.add_argument)
    return losses.build(parser.parse_args(words), has_sets)


@pytest.mark.parametrize("words, smoothing", [((), 0.1), (("--label_smoothing=0",), 0.0),
                                              (("--label_smoothing=0.3",), 0.3)])  # fmt: skip
def test_labels_are_smoothed_as_chosen(words, smoothing):
    shares = torch.eye(3)[LABELS] * (1 - smoothing) + smoothing / 3
    entropy = -(shares * LOGITS.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(build(*words)(LOGITS, LABELS), entropy)
    chance = LOGITS.sigmoid()
    binary = -(shares * chance.log() + (1 - shares) * (1 - chance).log()).mean()
    for targets in (LABELS, torch.eye(3)[LABELS]):
        torch.testing.assert_close(build(*words, "--loss=bce", has_sets=True)(LOGITS, targets), binary)


def test_several_labels_need_the_binary_loss():
    with pytest.raises(BadInput, match="--loss bce"):
        build(has_sets=True)
