import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from common.evaluation import evaluate, sums


@pytest.mark.parametrize("sizes", [[17], [5, 12], [1] * 17, [16, 1]])
def test_sums_are_exact_whatever_the_batches(sizes):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(12, 5))
    images, labels = torch.randn(17, 3, 2, 2), torch.randint(5, (17,))
    loss_sum, correct, count = evaluate(
        model, zip(images.split(sizes), labels.split(sizes), strict=True)
    ).tolist()
    assert model.training, "the mode is restored"
    model.eval()
    probabilities = model(images).detach().double().softmax(1)
    assert count == 17
    assert correct / count == accuracy_score(labels, probabilities.argmax(1))
    assert loss_sum / count == pytest.approx(log_loss(labels, probabilities, labels=range(5)), rel=1e-5)
    assert evaluate(model, []).tolist() == [0, 0, 0] and not model.training


def test_mirrored_images_count_as_much_as_the_images():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    images, labels = torch.randn(17, 3, 2, 2), torch.randint(5, (17,))
    loss_sum, correct, _ = evaluate(model, [(images, labels)], mirrored=True).tolist()
    logits = (model(images) + model(images[:, :, :, [1, 0]])).detach() / 2
    assert correct == (logits.argmax(1) == labels).sum()
    assert loss_sum / 17 == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_step_that_is_left_out_counts_nothing():
    logits, labels = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    assert sums(torch.tensor(2.0), logits, labels).tolist() == [8, 4, 4]
    assert sums(torch.tensor(float("nan")), logits, labels).tolist() == [0, 0, 0]
