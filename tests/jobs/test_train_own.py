"""train_own.py with other blocks and lines. test_proofs.py kills such jobs, on several processes."""

import re
from pathlib import Path

import pytest
import torch

from launch.new.cli import combine
from tests.conftest import ROOT, names, refused, run, run_ranks

OPTIONS = ("--epochs=3", "--batch_size=48", "--lr=0.01", "--report_every=1", "--save_every=4",
           "--workers=1")  # fmt: skip

# The lines of each block: data, model, loss.
TEXT = (
    """
    import functools

    from bootfile.loaders.map_style import map_style_loader

    # - train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    class Words(torch.utils.data.Dataset):  # does a word hold an "a"? Some letters are hidden at random
        def __init__(self, count):
            letters = torch.Generator().manual_seed(count)
            self.words = [torch.randint(1, 9, (n % 7 + 1,), generator=letters) for n in range(count)]

        def __len__(self):
            return len(self.words)

        def __getitem__(self, id):
            word = self.words[id]
            hidden = torch.rand(len(word)) < 0.1
            return {"word": word.masked_fill(hidden, 9), "label": int((word == 1).any())}

    def pad(items):
        words = torch.nn.utils.rnn.pad_sequence([each["word"] for each in items], batch_first=True)
        return words, torch.tensor([each["label"] for each in items])

    train_set, test_set = Words(200), Words(50)
    make_loader = functools.partial(map_style_loader, workers=args.workers, collate_fn=pad)
    """,
    """
    import random

    import numpy

    # -
    # - model = models.resnet18(train_set.channels, train_set.classes, args.width)
    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.letters, self.head = torch.nn.Embedding(10, 8, padding_idx=0), torch.nn.Linear(8, 2)
            self.dropout = torch.nn.Dropout(0.2)  # on each rank it draws as many numbers as its batch is long

        def forward(self, words):
            if self.training and words.shape[1] > 1:  # noise, too
                words = words.roll(random.randrange(words.shape[1]), 1)
            letters = self.dropout(self.letters(words)) * (0.9 + 0.2 * numpy.random.rand())
            return self.head(letters.max(dim=1).values)

    model = Reader()
    """,
    """
    # - criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    """,
)


def write_job(folder: Path, blocks: tuple | None, distributed: bool, *changes: tuple[str, str]) -> Path:
    """Write train_own.py with these lines in its blocks, and train_ddp.py's blocks if it is distributed.
    changes: (line, new lines)."""
    jobs = ROOT / "jobs"
    parts = re.split(
        r"(?m)^( *### 新增 \(new\) .* ###)\n", (jobs / "train_own.py").read_text(encoding="utf-8")
    )
    for number, lines in enumerate(blocks or (), start=1):  # text, opening, block, closing, text, ...
        parts[4 * number + 2] = lines.strip("\n").removesuffix("    ")
    text = "".join(f"{part}\n" if "### 新增" in part else part for part in parts)
    if distributed:
        base, ddp = ((jobs / name).read_text(encoding="utf-8") for name in ("train.py", "train_ddp.py"))
        text = combine(base, ddp, text)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "jobs").mkdir(parents=True)
    for name in ("bootfile", "common", "datasets"):
        (folder / name).symlink_to(ROOT / name)
    job = folder / "jobs" / "job.py"
    job.write_text(text, encoding="utf-8")
    return job


def test_a_sharded_optimizer_is_refused_before_the_first_step(tmp_path):
    """The state of ZeroRedundancyOptimizer is on several ranks: rank 0 could not save it."""
    sharded = "optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=args.lr)"
    job = write_job(
        tmp_path / "job", None, True,
        ("    recipe = ", "    from torch.distributed import optim\n\n    recipe = "),
        ("torch.optim.SGD(model.parameters(), lr=args.lr, **recipe)", sharded),
    )  # fmt: skip
    ended, _ = run_ranks(job, *OPTIONS, f"--output_dir={tmp_path / 'output'}", code=2)
    assert "a checkpoint cannot be saved: " in ended.stderr and "step=1" not in ended.stdout


@pytest.mark.thorough
def test_other_data_do_not_resume(tmp_path):
    output = f"--output_dir={tmp_path / 'output'}"
    run(write_job(tmp_path / "job", None, False), *OPTIONS, "--max_steps=4", output)
    other = write_job(tmp_path / "other", None, False, ("(progression - 152)", "(152 - progression)"))
    assert "its training data is" in refused(other, *OPTIONS, output)


# An option of one's own that is a path


def write_with_file(folder, option: str):
    """Write a job whose data are in the file of --my_file."""
    line = "    args = parser.parse_args()\n"
    return write_job(folder, None, False, (line, f"    {option}\n{line}    torch.load(args.my_file)\n"))


WITHOUT_ROLE = 'data.add_argument("--my_file", metavar="PATH")'
ROLE = 'data.add_argument("--my_file", role="operation")'
PATH = 'import pathlib; data.add_argument("--my_file", type=pathlib.Path)'


@pytest.mark.thorough
@pytest.mark.parametrize("after", [ROLE, PATH], ids=["role", "type"])
def test_the_refusal_says_how_an_option_may_change_and_then_it_may(tmp_path, after):
    first = tmp_path / "first.pt"
    torch.save(torch.zeros(1), first)
    out = f"--output_dir={tmp_path / 'out'}"
    steps = ("--epochs=3", "--batch_size=96", "--save_every=1")
    job = write_with_file(tmp_path / "before", WITHOUT_ROLE)
    run(job, *steps, out, "--max_steps=2", f"--my_file={first}")
    moved = first.rename(tmp_path / "moved.pt")
    line = refused(job, *steps, out, f"--my_file={moved}")
    assert f"its --my_file is {first}, this run's is {moved}" in line
    assert 'role="operation"' in line

    mended = write_with_file(tmp_path / "after", after)
    printed = run(mended, *steps, out, "--max_steps=3", f"--my_file={moved}").stdout
    assert "resumed from" in printed
    moved = moved.rename(first)
    assert "resumed from" in run(mended, *steps, out, f"--my_file={moved}").stdout


# Habits with DistributedDataParallel that train wrongly end with a tensor's name, or are one warning

REPORTED = (*OPTIONS, "--batch_size=96", "--save_every=99")
LAYERS = "    model = torch.nn.Sequential(*layers)\n"
WRAPPED = "    forward.broadcast_buffers = False"
EPOCH = "        model.train()\n"
FORWARD = "outputs = forward(inputs)\n"
STEP = "                optimizer.step()\n"
FREEZE = LAYERS + "    model[0].requires_grad_(False)\n"
UNFREEZE = EPOCH + "        model[0].requires_grad_(epoch > 1)\n"
WRAP_AGAIN = """
        if epoch > 1 and not model[0].weight.requires_grad:
            model[0].requires_grad_(True)
            forward = torch.nn.parallel.DistributedDataParallel(model)
"""
ON_RANK_1 = """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.extra = torch.nn.Sequential(*layers), torch.nn.Linear(1, 1)
            self.register_buffer("queue", torch.zeros(64))

        def forward(self, x):
            z = self.body(x)
            return z + self.extra(z[:, None])[:, 0] if torch.distributed.get_rank() else z

    model = Net()
"""
QUEUE = ON_RANK_1.replace("if torch.distributed.get_rank() else z", "- self.queue.mean()").replace(
    "z = self.body(x)", "z = self.body(x); self.queue = z.detach().mean().expand(64).clone()"
)
NORMED = LAYERS.replace("*layers", "torch.nn.BatchNorm1d(10), *layers")
RECALIBRATED = STEP + "                model[0].running_mean.copy_(inputs.mean(0))\n"
ALONE = "                if not torch.distributed.get_rank(): optimizer.step()\n"
APART = {  # the error: changes of the job
    "model.0.weight of rank 1 is not ... rank 0 after step 4": [(LAYERS, FREEZE), (EPOCH, UNFREEZE)],
    "model.0.weight of rank 1 is not ... rank 0 after step 1": [(FORWARD, "outputs = model(inputs)\n")],
    "rank 0: a layer ... replaced ... no gradient": [
        (WRAPPED, f"{WRAPPED}\n    model[2] = torch.nn.Linear(64, 1)")
    ],
    "not all ranks ... optimizer step of step 1 (rank 0: True)": [(STEP, ALONE)],
    "rank 0: extra.weight, extra.bias ... no gradient": [(LAYERS, ON_RANK_1)],
}
PERHAPS_WRONG = [  # changes of the job, and its warning
    ([], ""),
    ([(LAYERS, FREEZE), (EPOCH, EPOCH + WRAP_AGAIN)], ""),
    ([(LAYERS, QUEUE)], "warning: model.queue of rank 1 is not ... rank 0"),
    ([(LAYERS, NORMED)], ""),
    ([(LAYERS, NORMED), (STEP, RECALIBRATED)],
     "warning: model.0.running_mean of rank 1 is not ... rank 0 after step 1"),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("message", APART)
def test_ranks_that_train_apart_end_with_the_name_of_the_first_tensor(message, tmp_path):
    job = write_job(tmp_path / "job", None, True, *APART[message])
    results = run_ranks(job, *REPORTED, f"--output_dir={tmp_path / 'output'}", code=None)
    assert 2 in {result.returncode for result in results}
    parts = f"error: {message}".split(" ... ")
    assert any(names(result.stderr, *parts) for result in results), results
    assert not any("Traceback" in result.stderr for result in results)


@pytest.mark.thorough
@pytest.mark.parametrize(("changes", "warning"), PERHAPS_WRONG)
def test_what_is_right_has_no_warning_and_what_may_be_wrong_has_one(changes, warning, tmp_path):
    job = write_job(tmp_path / "job", None, True, *changes)
    printed = run_ranks(job, *REPORTED, f"--output_dir={tmp_path / 'output'}")[0].stdout
    assert printed.count("warning") == bool(warning) and names(printed, *warning.split(" ... "))
