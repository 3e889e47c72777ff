"""train_own.py with other blocks. test_proofs.py runs these jobs on several processes, and kills them."""

import re
from pathlib import Path

import pytest

from launch.new.blocks import combine
from tests.conftest import ROOT, run, run_ranks

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


def write_job(folder: Path, blocks: tuple | None, distributed: bool) -> Path:
    """Write train_own.py with these lines in its blocks, and train_ddp.py's blocks if it is distributed."""
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
    (folder / "jobs").mkdir(parents=True)
    for name in ("bootfile", "common", "datasets"):
        (folder / name).symlink_to(ROOT / name)
    job = folder / "jobs" / "job.py"
    job.write_text(text, encoding="utf-8")
    return job


def test_a_sharded_optimizer_is_refused_before_the_first_step(tmp_path):
    """The state of ZeroRedundancyOptimizer is on several ranks: rank 0 could not save it."""
    job = write_job(tmp_path / "job", None, distributed=True)
    text = job.read_text(encoding="utf-8")
    sharded = (
        "torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=args.lr)"
    )
    text = re.sub(r"optimizer = torch.optim.SGD\(.*\)", f"optimizer = {sharded}", text)
    job.write_text(text.replace("import torch\n", "import torch\nimport torch.distributed.optim\n", 1))
    refused, _ = run_ranks(job, *OPTIONS, f"--output_dir={tmp_path / 'output'}", code=2)
    assert "a checkpoint cannot be saved: " in refused.stderr and "step=1" not in refused.stdout


@pytest.mark.thorough
def test_other_data_do_not_resume(tmp_path):
    job = write_job(tmp_path / "job", None, distributed=False)
    run(job, *OPTIONS, "--max_steps=4", f"--output_dir={tmp_path / 'output'}")
    text = job.read_text(encoding="utf-8")
    job.write_text(text.replace("(progression - 152)", "(152 - progression)"), encoding="utf-8")
    refused = run(job, *OPTIONS, f"--output_dir={tmp_path / 'output'}", code=2)
    assert "its training data is" in refused.stderr and refused.stderr.count("\n") == 1
