"""train_text.py: a language model that is resumed exactly, on any form of data."""

import errno
import importlib
import lzma
import os
import pickle

import numpy as np
import pytest
import torch

from bootfile.ground.errors import BadInput
from common.compute.gpt import GPT, generate
from common.run.metrics import Perplexity
from datasets.memory import tokens
from launch.new.cli import make_job
from tests.conftest import ROOT, records, run, run_ranks
from tests.support.exact import changed

TEXTS = ROOT / "datasets" / "memory"
OPTIONS = (f"--data_url={TEXTS}", "--layers=1", "--heads=2", "--width=16", "--context=32", "--epochs=3",
           "--dropout=0.1", "--accumulate=2", "--batch_size=64", "--report_every=1", "--save_every=3",
           "--warmup=9", "--lr=0.01")  # fmt: skip


def test_its_figures_text_and_report(tmp_path):
    whole = tmp_path / "whole"
    printed = run("jobs/train_text.py", *OPTIONS, f"--output_dir={whole}").stdout
    assert "\n| " in printed and "image" not in printed  # the text that the model wrote
    lines = records(whole)
    last = [line for line in lines if "val_loss" in line][-1]
    assert last["val_perplexity"] == pytest.approx(np.exp(last["val_loss"]), rel=1e-5)
    assert lines[0]["loss"] == pytest.approx(np.log(256), rel=0.02) and last["val_loss"] < lines[0]["loss"]
    assert {"tokens_per_s"} == {name for line in lines for name in line if name.endswith("_per_s")}
    page = tmp_path / "report.html"
    run("-m", "launch", "report", whole, "--to", page)
    assert "Tokens per second" in page.read_text(encoding="utf-8")


def test_accumulated_gradients_are_sent_once_a_step(tmp_path):
    line = "    forward.broadcast_buffers = False"
    hook = (
        "    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\n"
        "    hook = lambda _, bucket: print('sent a bucket') or allreduce_hook(None, bucket)\n"
        f"    forward.register_comm_hook(None, hook)\n{line}"
    )
    text = make_job(ddp=True, amp=False, text=True)
    job = changed(text, tmp_path / "train.py", (line, hook))
    options = (*OPTIONS, "--accumulate=4", "--max_steps=3", f"--output_dir={tmp_path / 'output'}")
    assert run_ranks(job, *options)[0].stdout.count("sent a bucket") == 3


def test_a_folder_of_texts_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text " * 100)
    real = os.scandir

    def scan(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(BadInput, match=r"cannot list .*Permission denied"):
        tokens.load(str(tmp_path), 8)


def test_forms_of_data(tmp_path):
    text = ("The cat sat on the mat, and so on. " * 20).encode()
    (tmp_path / "a").mkdir()
    (tmp_path / "text").write_bytes(text)
    (tmp_path / "a" / "one.txt").write_bytes(text)
    (tmp_path / "a" / "image.png").write_bytes(b"\0" * 999)
    file, folder = (tokens.load(str(tmp_path / name), 8) for name in ("text", "a"))
    assert [part.tokens.tobytes() for part in file] == [part.tokens.tobytes() for part in folder]
    assert file[0].text(file[0].tokens[:7]) == "The cat" and file[0].vocabulary == 256

    numbers = np.arange(500, dtype=np.uint16) * 100
    for name, part in (("train.bin", numbers), ("val.bin", numbers[:100])):
        part.tofile(tmp_path / "a" / name)
    train, test = tokens.load(str(tmp_path / "a"), 8)
    assert train.vocabulary == 49_920 and len(test) == 99 // 8
    inputs, following = test[1]
    assert inputs.tolist() == numbers[8:16].tolist() and following.tolist() == numbers[9:17].tolist()
    starts = {int(train[len(train) - 1][0][0]) for _ in range(200)}
    assert len(starts) == 8 and max(starts) <= numbers[-9]
    assert test.text(inputs[:2]) == "800 900"


def _header(magic: int, numbers: np.ndarray) -> bytes:
    """Return a file of llm.c."""
    return np.array([magic, 1, len(numbers)] + [0] * 253, "<i4").tobytes() + numbers.tobytes()


GPT2, LLAMA = (np.random.default_rng(0).integers(0, top, 600) for top in (50257, 128000))
WORDS = np.random.default_rng(0).zipf(1.3, 20000) % 50257
CHARACTERS, BASES = np.arange(600) % 65, np.arange(600) % 4
LINES = np.pad(GPT2.reshape(-1, 3), ((0, 0), (0, 9))).ravel()
FILES = {  # content of train.bin and val.bin: the tokens that are read, or words of the error
    "uint16": (GPT2.astype("<u2").tobytes(), GPT2),
    "few characters": (CHARACTERS.astype("<u2").tobytes(), CHARACTERS),
    "four bases": (BASES.astype("<u2").tobytes(), BASES),
    "uint32": (GPT2.astype("<u4").tobytes(), GPT2),
    "uint32, 17 bits": (LLAMA.astype("<u4").tobytes(), LLAMA),
    "int32 of characters": (CHARACTERS.astype("<i4").tobytes(), CHARACTERS),
    "int64": (LLAMA.astype("<i8").tobytes(), LLAMA),
    "llm.c": (_header(20240520, GPT2.astype("<u2")), GPT2),
    "llm.c of Llama": (_header(20240801, LLAMA.astype("<u4")), LLAMA),
    "llm.c cut": (_header(20240520, GPT2.astype("<u2"))[:-2], "train.bin has 599 tokens, .*header .*600"),
    "llm.c longer": (
        _header(20240520, GPT2.astype("<u2")) + b"\1\0",
        "train.bin has 601 tokens, .*header .*600",
    ),
    "uint32 cut": (GPT2.astype("<u4").tobytes()[:-2], "\\(<i4\\), or cut; expected uint16"),
    "npy": (b"\x93NUMPY\1\0" + GPT2.astype("<u2").tobytes(), "header of another kind.* uint16"),
    "text": ("Ein schöner Text. ".encode() * 50, "a text"),
    "uint8": (CHARACTERS.astype("u1").tobytes(), r"type .*\(u1\)"),
    "float32": (CHARACTERS.astype("<f4").tobytes(), "<f4"),
    "big endian": (CHARACTERS.astype(">u2").tobytes(), ">u2"),
    "negative": (
        np.where(GPT2 > 40000, -100, GPT2).astype("<i8").tobytes(),
        "token 18446744073709551516 in uint64",
    ),
    "negative int32": (
        np.where(GPT2 > 40000, -1, GPT2).astype("<i4").tobytes(),
        "token 4294967295 in uint32",
    ),
    "negative int64": (
        np.where(WORDS % 9, WORDS, -1).astype("<i8").tobytes(),
        "token 18446744073709551615 in uint64",
    ),
    "int64, above 16 bits": ((WORDS + 70000).astype("<i8").tobytes(), WORDS + 70000),
    "words": (WORDS.astype("<u2").tobytes(), WORDS),
    "lines with padding": (LINES.astype("<u2").tobytes(), LINES),
    "words of another byte order": (WORDS.astype(">u2").tobytes(), ">u2"),
    "float16 of words": ((WORDS % 2000).astype("<f2").tobytes(), "<f2"),
    "float32 of words": (WORDS.astype("<f4").tobytes(), "<f4"),
    "float64 of words": (WORDS.astype("<f8").tobytes(), "<f8"),
    "compressed": (lzma.compress(WORDS.astype("<u2").tobytes() * 2), r"\(u1\)"),
    "pickle": (pickle.dumps(WORDS.tolist(), 2), r"\(u1\)"),
    "zip": (b"PK\3\4" + WORDS.astype("<u2").tobytes(), "the header of another kind"),
    "another llm.c": (_header(20250101, WORDS.astype("<u2")), "the header of another kind"),
    "Latin-1": ("une façon café ".encode("latin-1") * 400, r"\(u1\)"),
    "Chinese": (("模型的名字是什么" * 50).encode(), "a text"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_tokens(name, tmp_path):
    content, expected = FILES[name]
    for file in ("train.bin", "val.bin"):
        (tmp_path / file).write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(BadInput, match=expected):
            tokens.load(str(tmp_path), 8)
        return
    train, _ = tokens.load(str(tmp_path), 8)
    assert train.tokens.tolist() == expected.tolist() and train.vocabulary >= expected.max() + 1
    assert f"highest token {expected.max()}" in train.source and train[0][0].dtype == torch.int64


CASES = ["short", "fifo", "fifo.bin", "odd", "no val.bin", "one bin", "no texts", "missing"]


@pytest.mark.parametrize("case", CASES)
def test_data_that_cannot_be_used(case, tmp_path):
    path, folder = tmp_path / "file.txt", str(tmp_path)
    if case == "short":
        path.write_text("A few words.")
    elif case.startswith("fifo"):
        os.mkfifo(tmp_path / "train.bin" if case == "fifo.bin" else path)
    elif case in ("odd", "no val.bin"):
        (tmp_path / "train.bin").write_bytes(b"12345"[: 5 if case == "odd" else 4])
    elif case == "one bin":
        folder = str(tmp_path / "train.bin")
        np.arange(500, dtype=np.uint16).tofile(folder)
    elif case == "missing":
        folder = str(tmp_path / "nothing")
    with pytest.raises(BadInput, match=folder):
        tokens.load(folder, 8)


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
def test_a_compressed_text_is_refused(module, tmp_path):
    """Its bytes would be the tokens."""
    path = tmp_path / "texts.jsonl.packed"
    path.write_bytes(importlib.import_module(module).compress(b"words " * 500))
    with pytest.raises(BadInput, match=f"{path} is not a text, .*compressed"):
        tokens.load(str(path), 8)


def test_bad_options_end_before_the_first_step():
    for option in ("--heads=3", "--dropout=1", "--context=99999"):
        error = run("jobs/train_text.py", f"--data_url={TEXTS}", "--width=16", option, code=2).stderr
        assert option.partition("=")[2] in error and error.count("\n") == 1


def test_a_run_does_not_continue_with_another_number_of_heads(tmp_path):
    """All weights have the same shapes."""
    command = ("jobs/train_text.py", *OPTIONS, f"--output_dir={tmp_path}")
    run(*command, "--max_steps=3")
    assert "--heads" in run(*command, "--max_steps=6", "--heads=4", code=2).stderr


def test_a_token_is_predicted_from_those_before_it():
    torch.manual_seed(0)
    model = GPT(64, 16, layers=2, heads=2, width=16).eval()
    text = torch.randint(64, (1, 16))
    other = text.clone()
    other[0, 9:] = (other[0, 9:] + 1) % 64
    first, second = model(text), model(other)
    assert torch.equal(first[0, :9], second[0, :9]) and not torch.equal(first[0, 9:], second[0, 9:])
    assert model.head.weight is model.tokens.weight


def test_writing_does_not_change_the_random_numbers_of_the_training():
    model = GPT(64, 16, dropout=0.5)
    state = torch.random.get_rng_state()
    first, second = (generate(model, torch.zeros(1, dtype=torch.int64), 20, 16, seed=1) for _ in range(2))
    assert torch.equal(first, second) and len(first) == 20 and model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_that_has_diverged_writes_something():
    """Its logits are NaN. On a GPU, no later call of the process would succeed after torch.multinomial."""
    model = GPT(64, 16)
    torch.nn.init.constant_(model.norm.weight, torch.nan)
    assert generate(model, torch.zeros(1, dtype=torch.int64), 3, 16, seed=1).max() < 64


def test_perplexity_of_batches_adds_up():
    logits, targets = torch.randn(6, 5, 9), torch.randint(9, (6, 5))
    metric = Perplexity()
    total = metric.sums(logits[:2], targets[:2]) + metric.sums(logits[2:], targets[2:])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert metric.value(total) == pytest.approx(loss.exp().item(), rel=1e-5)
