import math

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from common.evaluation import batch_sums, evaluate
from common.exits import BadInput

cross_entropy = nn.functional.cross_entropy


@pytest.mark.parametrize("sizes", [[17], [5, 12], [1] * 17, [16, 1]])
def test_sums_are_exact_whatever_the_batches(sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 5))
    images, labels = torch.randn(17, 3, 2, 2), torch.randint(5, (17,))
    loss_sum, correct, count = evaluate(
        model, zip(images.split(sizes), labels.split(sizes), strict=True), cross_entropy
    ).tolist()
    assert model.training, "the mode is restored"
    model.eval()
    probabilities = model(images).detach().double().softmax(1)
    assert count == 17
    assert correct / count == accuracy_score(labels, probabilities.argmax(1))
    assert loss_sum / count == pytest.approx(log_loss(labels, probabilities, labels=range(5)), rel=1e-5)
    assert evaluate(model, [], cross_entropy).tolist() == [0, 0, 0] and not model.training


def test_mirrored_images_count_as_much_as_the_images():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    images, labels = torch.randn(17, 3, 2, 2), torch.randint(5, (17,))
    loss_sum, correct, _ = evaluate(model, [(images, labels)], cross_entropy, mirrored=True).tolist()
    logits = (model(images) + model(images[:, :, :, [1, 0]])).detach() / 2
    assert correct == (logits.argmax(1) == labels).sum()
    assert loss_sum / 17 == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_step_that_is_left_out_counts_nothing():
    logits, labels = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    assert batch_sums(torch.tensor(2.0), logits, labels).tolist() == [8, 4, 4]
    assert batch_sums(torch.tensor(float("nan")), logits, labels).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("criterion", "last", "labels"),
    [
        (nn.MSELoss(), [nn.Flatten(), nn.Linear(12, 1)], torch.randn(17, 1)),
        (nn.L1Loss(), [nn.Flatten(), nn.Linear(12, 1), nn.Flatten(0)], torch.randn(17)),
        (nn.BCEWithLogitsLoss(), [nn.Flatten(), nn.Linear(12, 5)], torch.rand(17, 5).round()),
        (nn.CrossEntropyLoss(), [nn.Conv2d(3, 5, 1)], torch.randint(5, (17, 2, 2))),
        (nn.MSELoss(), [nn.Conv2d(3, 3, 1)], torch.randn(17, 3, 2, 2)),
    ],
    ids=["regression", "one number", "several labels", "segmentation", "restoration"],
)  # fmt: skip
def test_other_jobs_have_their_own_loss_and_no_accuracy(criterion, last, labels):
    model, images = nn.Sequential(*last), torch.randn(17, 3, 2, 2)
    batches = list(zip(images.split([5, 12]), labels.split([5, 12]), strict=True))
    loss_sum, correct, count = evaluate(model, batches, criterion).tolist()
    loss = criterion(model(images), labels)
    assert count == 17 and loss_sum / 17 == pytest.approx(loss.item(), rel=1e-5)
    assert math.isnan(correct)
    loss_sum, correct, count = batch_sums(loss, model(images), labels).tolist()
    assert count == 17 and loss_sum == pytest.approx(17 * loss.item(), rel=1e-5) and math.isnan(correct)
    loss_sum, correct, count = batch_sums(loss * torch.inf, model(images), labels).tolist()
    assert (loss_sum, count) == (0, 0) and math.isnan(correct)


def test_the_loss_is_that_of_the_criterion():
    model, images, labels = nn.Flatten(), torch.randn(6, 3, 2, 2), torch.randint(12, (6,))
    model.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    loss_sum, correct, count = evaluate(model, [(images, labels)], smooth).tolist()
    assert loss_sum / count == pytest.approx(smooth(images.flatten(1), labels).item(), rel=1e-5)
    assert correct == (images.flatten(1).argmax(1) == labels).sum()


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "has reduction='sum'"),
        (nn.CrossEntropyLoss(reduction="none"), "has reduction='none'"),
        (lambda logits, labels: cross_entropy(logits, labels, reduction="none"), r"of shape \[6\]"),
    ],
)
def test_a_loss_that_is_not_a_mean_is_refused(criterion, message):
    model, images, labels = nn.Linear(4, 3), torch.randn(6, 4), torch.randint(3, (6,))
    with pytest.raises(BadInput, match=rf"{message}.*the mean over the batch"):
        evaluate(model, [(images, labels)], criterion)
