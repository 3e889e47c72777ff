import pytest

from common import schedule


@pytest.mark.parametrize("kind, expected", [
    ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ("step", [0.5, 1.0, 0.1, 0.1, 0.01, 0.01]),
])  # fmt: skip
def test_rates_of_three_epochs_of_two_steps(kind, expected):
    rate = schedule.factor(kind, warmup=1, epochs=3, steps_per_epoch=2, steps=6)
    assert [rate(step) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_a_warm_up_that_is_longer_than_the_training_rises_to_its_end():
    rate = schedule.factor("cosine", warmup=8, epochs=1, steps_per_epoch=4, steps=4)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_ninety_epochs_step_where_the_recipe_steps():
    rate = schedule.factor("step", warmup=0, epochs=90, steps_per_epoch=1, steps=90)
    assert [epoch for epoch in range(1, 90) if rate(epoch) < rate(epoch - 1)] == [30, 60, 80]
