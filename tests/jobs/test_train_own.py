"""train_own.py works with other blocks, on one and two processes, and after a kill and a restart."""

import re
from pathlib import Path

import pytest

from datasets.sampling import receipt
from launch.new.blocks import combine
from launch.compare import compare_states
from tests.conftest import ROOT, finish, read_until, records, run, run_ranks, start_ranks
from tests.jobs.test_resume import figures, same_weights, weights

OPTIONS = ("--epochs=3", "--batch_size=48", "--lr=0.01", "--report_every=1", "--save_every=4",
           "--workers=1")  # fmt: skip

# The lines of each block: data, model, loss.
TEXT = (
    """
    import functools

    from datasets.loaders.engines.map_style import map_style_loader

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
    for name in ("common", "datasets"):
        (folder / name).symlink_to(ROOT / name)
    job = folder / "jobs" / "job.py"
    job.write_text(text, encoding="utf-8")
    return job


CASES = [
    pytest.param(None, 1, id="table-1"),
    pytest.param(None, 2, id="table-2", marks=pytest.mark.faults),
    pytest.param(TEXT, 1, id="text-1", marks=pytest.mark.faults),
    pytest.param(TEXT, 2, id="text-2"),
    pytest.param(TEXT, 4, id="text-4", marks=pytest.mark.faults),
]


@pytest.mark.parametrize("blocks, ranks", CASES)
def test_a_job_of_ones_own_continues_exactly(blocks, ranks, tmp_path):
    alone = write_job(tmp_path / "alone", blocks, distributed=False)
    job = write_job(tmp_path / "shared", blocks, distributed=True) if ranks > 1 else alone

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(job, *OPTIONS, f"--output_dir={whole}", ranks=ranks)
    processes = start_ranks(job, *OPTIONS, f"--output_dir={killed}", ranks=ranks)
    read_until(processes[0], r"^epoch=2 step=\d+ loss")
    processes[-1].kill()
    for process in processes:
        finish(process, None)
    printed = run_ranks(job, *OPTIONS, f"--output_dir={killed}", ranks=ranks)[0].stdout
    assert re.search(r"resumed from .* step \d+ of \d+", printed)

    assert figures(killed) == figures(whole)
    assert same_weights(weights(killed), weights(whole))
    assert (killed / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()
    assert compare_states(str(whole), str(killed)) == (True, "equal at steps 4, 8, 12") or blocks is not TEXT
    if ranks > 1:
        run(alone, *OPTIONS, f"--output_dir={tmp_path / 'one'}")
        assert (tmp_path / "one" / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()
        ends = [
            [line for line in records(tmp_path / name) if "val_loss" in line][-1] for name in ("one", "whole")
        ]
        assert ends[0]["val_count"] == ends[1]["val_count"]
        if blocks is not TEXT:  # its ranks draw different masks of the dropout
            assert ends[0]["val_loss"] == pytest.approx(ends[1]["val_loss"], rel=1e-3)


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


@pytest.mark.faults
def test_other_data_do_not_resume(tmp_path):
    job = write_job(tmp_path / "job", None, distributed=False)
    run(job, *OPTIONS, "--max_steps=4", f"--output_dir={tmp_path / 'output'}")
    text = job.read_text(encoding="utf-8")
    job.write_text(text.replace("(progression - 152)", "(152 - progression)"), encoding="utf-8")
    refused = run(job, *OPTIONS, f"--output_dir={tmp_path / 'output'}", code=2)
    assert "its training data is" in refused.stderr and refused.stderr.count("\n") == 1
