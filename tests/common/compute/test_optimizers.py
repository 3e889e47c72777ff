"""The optimizer and the schedule of imagenet.py: further arguments, layer decay, a last learning rate."""

import argparse

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.compute import classifiers, optimizers
from common.console.arguments import Parser

pytestmark = pytest.mark.rounding

CPU = torch.device("cpu")


def parse(*words) -> argparse.Namespace:
    parser = Parser("test")
    optimizers.add_arguments(parser.add_argument)
    args = parser.parse_args(words)
    vars(args).update(optimizers.check(args))
    args.epochs = 4
    return args


def test_a_block_of_a_job_gives_further_arguments():
    args = parse("--optimizer=adamw")
    optimizer = optimizers.build(args, torch.nn.Linear(2, 2), CPU, betas=(0.9, 0.95), eps=1e-6)
    group = optimizer.param_groups[1]
    assert group["betas"] == (0.9, 0.95) and group["eps"] == 1e-6 and group["weight_decay"] == 0


@pytest.mark.parametrize("name, first, last", [("resnet18", "conv1.weight", "fc.bias"),
                                               ("vit_b_32", "class_token", "heads.head.weight")])  # fmt: skip
def test_each_layer_has_a_share_of_the_rate_of_the_next(name, first, last):
    model = classifiers.on_meta(lambda: classifiers.build(name, 3, 32))
    args = parse("--lr=1", "--layer_decay=0.5")
    optimizer = optimizers.build(args, model, CPU)
    names = {id(each): name for name, each in model.named_parameters()}
    rates = {names[id(each)]: group["lr"] for group in optimizer.param_groups for each in group["params"]}
    blocks = {"resnet18": 8, "vit_b_32": 12}[name]
    assert rates.keys() == set(names.values()) and optimizer.param_groups[0]["lr"] == 1
    assert rates[last] == 1 and rates[first] == 0.5 ** (blocks + 1) and len(set(rates.values())) == blocks + 2


def test_without_layer_decay_there_are_two_groups_and_no_blocks_are_refused():
    model = torch.nn.Linear(2, 2)
    assert [len(group["params"]) for group in optimizers.build(parse(), model, CPU).param_groups] == [1, 1]
    with pytest.raises(BadInput, match="layer_decay"):
        optimizers.build(parse("--layer_decay=0.5"), model, CPU)


def test_a_last_rate_needs_a_schedule_that_ends_at_it():
    with pytest.raises(BadInput, match="--min_lr"):
        parse("--lr_schedule=step", "--min_lr=0.01")


@pytest.mark.parametrize("decay", [0.5, 1])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_each_layer_ends_at_its_share_of_the_last_rate(schedule, decay):
    words = (f"--lr_schedule={schedule}", "--min_lr=0.25", "--warmup=1", f"--layer_decay={decay}")
    args = parse("--lr=1", *words)
    optimizer = optimizers.build(args, classifiers.build("resnet18", 3, 32), CPU)
    first = [group["lr"] for group in optimizer.param_groups]
    scheduler = optimizers.build_scheduler(args, optimizer, 5, 20)
    for _ in range(20):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.25 * each for each in first])


def _rates(steps: int, *words: str) -> list[float]:
    """Return the learning rates of a run of four epochs with nine steps each."""
    args = parse("--lr=1", *words)
    optimizer = optimizers.build(args, torch.nn.Linear(2, 2), CPU)
    scheduler = optimizers.build_scheduler(args, optimizer, 9, 36)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_rate_falls_at_the_steps_of_the_schedule_and_rises_first():
    expected = [1.0] * 12 + [0.1] * 12 + [0.01] * 8 + [0.001] * 4
    assert _rates(36, "--lr_schedule=step", "--warmup=0") == pytest.approx(expected)
    rising = [(step + 1) / 18 for step in range(18)]  # two epochs: the first fall waits for them
    assert _rates(36, "--lr_schedule=step", "--warmup=2") == pytest.approx(rising + expected[18:])
    assert _rates(9, "--warmup=1") == pytest.approx([(step + 1) / 9 for step in range(9)])


@pytest.mark.parametrize("words, lr, decay", [([], 0.256, 1 / 32768), (["--optimizer=adamw"], 0.001, 0.05)])
def test_the_defaults_of_an_optimizer(words, lr, decay):
    optimizer = optimizers.build(parse(*words), torch.nn.Linear(2, 2), CPU)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (lr, decay),
        (lr, 0),
    ]
    assert [group["params"][0].ndim for group in optimizer.param_groups] == [2, 1]
    if not words:
        assert {group["momentum"] for group in optimizer.param_groups} == {0.875}
        other = optimizers.build(parse("--momentum=0.5"), torch.nn.Linear(2, 2), CPU)
        assert other.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("words, norm", [([], 5), (["--clip_grad=0.5"], 0.5), (["--clip_grad=9"], 5)])
def test_only_a_larger_norm_is_clipped(words, norm):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizers.clip(parse(*words), model)
    assert model.weight.grad.norm().item() == pytest.approx(norm)


def test_arguments_of_the_model_are_a_table():
    assert classifiers.build("efficientnet_b0", 3, 32, "{dropout = 0.7}").classifier[0].p == 0.7
    with pytest.raises(BadInput, match=r"--model_kwargs {dropot = 0.7}: .*'dropot'"):
        classifiers.build("efficientnet_b0", 3, 32, "{dropot = 0.7}")
    for text in ('[["dropout", 0.7]]', "[]", "{}\ndropout = 0.7", "{dropout = }"):
        with pytest.raises(BadInput, match="is not an inline table of TOML"):
            classifiers.build("efficientnet_b0", 3, 32, text)


def test_arguments_of_a_model_of_timm():
    pytest.importorskip("timm")
    model = classifiers.build("timm:vit_tiny_patch16_224", 3, 32, "{drop_path_rate = 0.3, depth = 2}")
    assert len(model.blocks) == 2 and model.blocks[1].drop_path1.drop_prob == pytest.approx(0.3)
    for table in ("{drop_path_rat = 0.1}", "{num_classes = 5}", '{act_layer = "x"}', "{patch_size = 0}",
                  "{num_heads = 0}", '{checkpoint_path = "x"}', "{features_only = true}"):  # fmt: skip
        with pytest.raises(BadInput, match=f"--model_kwargs {table}.*"):
            classifiers.build("timm:vit_tiny_patch16_224", 3, 32, table)
