import fractions
import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from bootfile.ground.errors import BadInput
from bootfile.sampling.sampler import SequentialBatchSampler
from common.run import metrics
from common.run.evaluation import batch_sums, evaluate
from common.run.metrics import R2, ConfusionMatrix, Metrics, Perplexity, absolute_error, top

pytestmark = pytest.mark.rounding

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


WEIGHTS = torch.tensor([1.0, 20.0, 0.0])


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
        nn.CrossEntropyLoss(),
        lambda logits, labels: cross_entropy(logits, labels, WEIGHTS, ignore_index=0),
        lambda logits, labels: nn.functional.nll_loss(logits.log_softmax(1), labels, weight=WEIGHTS),
        nn.BCEWithLogitsLoss(weight=torch.tensor([1.0, 2.0, 3.0]), pos_weight=torch.tensor([9.0, 1.0, 1.0])),
        lambda logits, labels: cross_entropy(logits, nn.functional.one_hot(labels, 3).float(), WEIGHTS),
    ],
    ids=["weight", "weight, smoothed", "ignore", "plain", "function", "nll", "bce", "shares"],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 60])
def test_a_loss_is_that_of_the_whole_set_at_any_batch_size(criterion, size, capsys):
    """Batches of one class have other weights than the set, and some have ignored labels only."""
    logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    labels = (torch.arange(60) // 20).sort().values
    if isinstance(criterion, nn.BCEWithLogitsLoss):
        labels = nn.functional.one_hot(labels, 3).float()
    whole, metrics = criterion(logits, labels).item(), Metrics(best="loss")
    batches = list(zip(logits.split(size), labels.split(size), strict=True))
    sums = evaluate(nn.Identity(), batches, criterion, metrics)
    assert metrics.loss(sums) == pytest.approx(whole, rel=1e-6) == -metrics.score(sums) and sums[2] == 60
    loss_sum, _, count = evaluate(nn.Identity(), batches, criterion)
    assert loss_sum / count == pytest.approx(whole, rel=1e-6)
    parts = [evaluate(nn.Identity(), batches[k::2], criterion, metrics) for k in range(2)]  # two ranks
    assert metrics.loss(sum(parts)) == pytest.approx(whole, rel=1e-6)
    assert "warning" not in capsys.readouterr().out


def test_labels_of_masks_that_are_ignored_count_nothing():
    logits, masks = torch.randn(6, 4, 3, 5), torch.randint(4, (6, 3, 5))
    masks[:3, 1:], masks[5] = -100, -100
    criterion, metrics = nn.CrossEntropyLoss(), Metrics()
    for size in (1, 4):
        batches = zip(logits.split(size), masks.split(size), strict=True)
        sums = evaluate(nn.Identity(), batches, criterion, metrics)
        assert metrics.loss(sums) == pytest.approx(criterion(logits, masks).item(), rel=1e-6)
    nothing = evaluate(nn.Identity(), [(logits[5:], masks[5:])], criterion, metrics)
    assert nothing[0] == 0 and math.isnan(metrics.loss(nothing)) and nothing[2] == 1
    tokens, following = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    following[0, 2:] = -100
    sums = Perplexity().sums(tokens, following)
    assert Perplexity().value(sums) == pytest.approx(
        cross_entropy(tokens.flatten(0, 1), following.flatten()).exp()
    )


def _over_ranks(metrics, outputs, targets, criterion, ranks, batch=7):
    """Evaluate each rank's part of the given outputs, and return the sum over the ranks."""
    total = torch.zeros(3 + metrics.size, dtype=torch.float64)
    for rank in range(ranks):
        parts = SequentialBatchSampler(len(outputs), batch).for_rank(rank, ranks)
        batches = ((outputs[ids], targets[ids]) for ids in parts)
        total += evaluate(nn.Identity(), batches, criterion, metrics)
    return total


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_metrics_are_those_of_the_whole_set(ranks, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(53, 7, generator=generator)
    labels = torch.arange(53) % 6  # one class has no sample
    metrics = Metrics(top3=top(3), per_class=ConfusionMatrix(7))
    sums = _over_ranks(metrics, logits, labels, nn.CrossEntropyLoss(), ranks)
    values = metrics.values(sums)
    assert values["top3"] == reference.top_k_accuracy_score(labels, logits, k=3, labels=range(7))
    assert values["per_class"] == reference.balanced_accuracy_score(labels, logits.argmax(1))
    matrix = reference.confusion_matrix(labels, logits.argmax(1), labels=range(7))
    classes = metrics.of_classes(sums)
    assert classes["matrix"].tolist() == matrix.tolist()
    assert metrics.score(sums) == reference.accuracy_score(labels, logits.argmax(1))

    monkeypatch.setattr("common.run.metrics._MOST_IN_A_MATRIX", 6)  # now counts per class, and no matrix
    counted = Metrics(per_class=ConfusionMatrix(7))
    few = _over_ranks(counted, logits, labels, nn.CrossEntropyLoss(), ranks)
    assert counted.values(few)["per_class"] == values["per_class"] and len(few) == 3 + 2 * 7 + 1
    assert counted.of_classes(few) == classes | {"matrix": None}

    targets = torch.randn(53, 2, generator=generator) + 1000
    outputs = targets + torch.randn(53, 2, generator=generator)
    metrics = Metrics("mae", True, mae=absolute_error, r2=R2(2))
    sums = _over_ranks(metrics, outputs, targets, nn.MSELoss(), ranks)
    values = metrics.values(sums)
    exact = targets.double(), outputs.double()
    assert values["mae"] == pytest.approx(reference.mean_absolute_error(*exact), rel=1e-14)
    assert values["r2"] == pytest.approx(reference.r2_score(*exact), abs=1e-8)
    assert metrics.score(sums) == -values["mae"]
    equal = torch.full((1000, 1), 0.1).double()  # the rounding of their sums does not count as variation
    assert math.isnan(R2().value(R2().sums(equal + 1, equal)))


def test_metrics_of_masks_and_of_nested_data():
    logits, masks = torch.randn(6, 4, 3, 3), torch.randint(4, (6, 3, 3))
    masks[0, 0] = -100  # of no class
    metrics = Metrics(classes=ConfusionMatrix(4), top4=top(4))
    sums = evaluate(nn.Identity(), [(logits, masks)], nn.CrossEntropyLoss(), metrics)
    assert metrics.of_classes(sums)["matrix"].sum() == 6 * 9 - 3 and sums[2] == 6
    assert metrics.values(sums)["top4"] == pytest.approx((6 * 9 - 3) / (6 * 9))

    class Scores(nn.Module):
        def forward(self, inputs):
            return {"score": inputs["a"].sum(1), "of": inputs["b"]}

    inputs = {"a": torch.ones(5, 3), "b": [torch.zeros(5)]}
    targets = {"names": ["a", "b", "c", "d", "e"], "wanted": torch.zeros(5)}
    metrics = Metrics("error", lowest=True, error=lambda outputs, targets: outputs["score"] - 1)
    sums = evaluate(Scores(), [(inputs, targets)], lambda outputs, _: outputs["score"].mean(), metrics)
    assert sums[2] == 5 and metrics.values(sums) == {"error": 2} and metrics.score(sums) == -2
    boxes = [{"boxes": torch.zeros(7, 4)}, {"boxes": torch.zeros(2, 4)}]
    assert batch_sums(torch.tensor(1.0), {}, boxes)[2] == 2


@pytest.mark.parametrize("most", [1000, 2])
def test_labels_beyond_the_classes_are_ignored(monkeypatch, most):
    monkeypatch.setattr(metrics, "_MOST_IN_A_MATRIX", most)  # with 2 there are counts per class only
    of_three = ConfusionMatrix(3)
    sums = of_three.sums(torch.eye(3)[[0, 1, 2, 2, 1]], torch.tensor([0, 3, -1, 2, 0]))
    counts = of_three.of_classes(sums)
    assert (counts["count"], counts["correct"]) == ([2, 0, 1], [1, 0, 1])
    assert of_three.value(sums) == 0.75  # a class without a label does not count


def test_the_metrics_of_a_classifier():
    assert metrics.of_classes(5, False, None).metrics.keys() == {"class_acc"}
    assert metrics.of_classes(6, False, "top5").metrics.keys() == {"top5", "class_acc"}
    assert metrics.of_classes(6, True, None).best == "f1"
    with pytest.raises(BadInput, match=r"--best_metric acc: .*expected f1 or loss"):
        metrics.of_classes(6, True, "acc")


def test_f1_is_that_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 5, generator=generator) / 4
    targets = torch.rand(40, 5, generator=generator) < 0.3
    f1 = metrics.F1(5)
    sums = f1.sums(logits[:17], targets[:17]) + f1.sums(logits[17:], targets[17:])
    assert f1.value(sums) == pytest.approx(reference.f1_score(targets, logits > 0, average="macro"))


def test_many_classes_need_memory_in_proportion_to_their_number():
    classes = 10**6  # a matrix would have 8 TB
    logits, labels = torch.zeros(2, classes), torch.tensor([0, classes - 1])
    own = metrics.of_classes(classes, False, None)
    sums = evaluate(nn.Identity(), [(logits, labels)], nn.CrossEntropyLoss(), own)
    assert own.values(sums)["class_acc"] == 0.5 and sum(own.of_classes(sums)["count"]) == 2
    assert len(sums) < 3 * classes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Metrics(best="mae"), "best='mae'.*expected one of loss, acc"),
        (lambda: Metrics(acc=absolute_error), "'acc'"),
        (lambda: Metrics(m=lambda outputs, targets: outputs), r"metric m: expected a tensor \[6\].*\[6, 3\]"),
        (lambda: Metrics(m=lambda outputs, targets: 1.0), r"metric m: .*got float"),
        (lambda: Metrics(m=absolute_error), r"absolute_error: .*\[6, 3\], targets \[6, 1\]"),
        (lambda: Metrics(m=top(5)), "the model has 3 classes"),
        (lambda: Metrics(m=ConfusionMatrix(4)), "the model has 3 classes"),
    ],
)
def test_a_wrong_metric_is_refused(make, message):
    logits, labels = torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(BadInput, match=message):
        evaluate(nn.Identity(), [(logits, labels)], nn.CrossEntropyLoss(), make())


class _Returns:
    """A metric whose value is what the test wants."""

    size = 1

    def __init__(self, result):
        self.result = result

    def sums(self, outputs, targets):
        return torch.ones(1)

    def value(self, sums):
        return self.result


@pytest.mark.parametrize(
    "result",
    [0.5, torch.tensor(0.5), torch.tensor(0.5, requires_grad=True), np.float32(0.5), np.array(0.5),
     fractions.Fraction(1, 2)],
    ids=repr,
)  # fmt: skip
def test_a_metric_may_return_a_number_of_torch_or_numpy(result):
    metrics_of_user = Metrics(score=_Returns(result), best="score")
    sums = torch.zeros(3 + metrics_of_user.size, dtype=torch.float64)
    value = metrics_of_user.values(sums)["score"]
    assert type(value) is float and value == 0.5
    assert metrics_of_user.score(sums) == 0.5 and json.dumps(metrics_of_user.values(sums))


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (torch.zeros(2), r"Tensor torch.float32 \[2\]"),
        (torch.zeros(1), r"Tensor torch.float32 \[1\]"),
        (np.zeros((2, 3)), r"ndarray float64 \[2, 3\]"),
        (None, "NoneType"),
        ("0.5", "str"),
        (torch.tensor(1j), "Tensor torch.complex64"),
        ({"f1": 1.0}, "dict"),
    ],
    ids=repr,
)
def test_a_metric_that_returns_no_number_is_named(result, kind):
    metrics_of_user = Metrics(score=_Returns(result))
    with pytest.raises(BadInput, match=rf"^metric score: .*number .*, got {kind}"):
        metrics_of_user.values(torch.zeros(3 + metrics_of_user.size))


def test_an_evaluation_without_the_metrics_is_refused():
    with pytest.raises(BadInput, match=r"metrics=log\.metrics"):
        Metrics(mae=absolute_error).values(torch.zeros(3))
