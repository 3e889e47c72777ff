"""A run as if some samples had never been in it: from step 1 on, or replayed from a state before their use.

The old run has steps 1-24 of 128 samples, and the states of steps 8, 16, 20 and 24.
"""

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from bootfile.histories import read_states
from bootfile.receipt.recorded_run import Run
from tests.conftest import QUICK, finish, names, read_until, refused, run, run_ranks, start
from tests.support.exact import changed

SMALL = ("jobs/train.py", *QUICK, "--batch_size=128", "--epoch_steps=6", "--report_every=2")
JOB = (*SMALL, "--epochs=4", "--save_every=4", "--keep=2", "--keep_every=8", "--sample_losses=true")
STEPS = 24


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old") / "run"
    run(*JOB, f"--output_dir={folder}")
    return folder


def ids_of(folder, step: int) -> list[int]:
    """Return the ids of the batch of a step."""
    return Run(str(folder)).sampler(step).batch(step - 1).tolist()


def choose(folder, step: int, count: int) -> list[int]:
    """Return samples of a step that no step before it had."""
    before = {id for number in range(1, step) for id in ids_of(folder, number)}
    chosen = [id for id in ids_of(folder, step) if id not in before][:count]
    assert len(chosen) == count
    return chosen


def write(path, ids) -> str:
    path.write_text("".join(f"{id}\n" for id in ids))
    return str(path)


def read(path) -> list[int]:
    return [int(line) for line in Path(path).read_text().splitlines()[2:]]


def sums(folder) -> dict[str, str]:
    """Return the SHA-256 of each file of weights."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.pth")}


def state(folder, step: int) -> str:
    return read_states(str(folder))[step]["digest"]


@pytest.fixture(scope="module")
def listed(old, tmp_path_factory):
    """Return the file of three samples, the first of which comes in step 11."""
    ids = [*choose(old, 11, 2), choose(old, 16, 1)[0]]
    return write(tmp_path_factory.mktemp("ids") / "ids.txt", ["# asked for on 2026-11-28", "", *ids])


@pytest.fixture(scope="module")
def whole(old, listed, tmp_path_factory):
    """Return a run from step 1 without them."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    shown = run(*JOB, f"--without={listed}", f"--output_dir={folder}").stdout
    assert re.search(r"^without 3 samples \(\w{12}\): no batch\b", shown, re.M)
    return folder


def test_a_replay_has_the_bits_of_a_run_without_the_samples(old, whole, listed, tmp_path):
    new = tmp_path / "new"
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    shown = run("-m", "launch", "replay", old, "--without", listed, "--output_dir", new).stdout
    first_use = r"^first use: samples \d+, \d+ in step 11, .*\b\d+ steps .*state after step 8\b"
    assert re.search(first_use, shown, re.M)
    assert "steps 9-10 are those of" in shown
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert state(new, STEPS) == state(whole, STEPS) != state(old, STEPS)
    known = sums(whole)
    made = sums(new)
    del known["epoch_1.pth"], known["best.pth"], made["best.pth"]
    assert made == known and len(known) == 3
    assert sums(old)["epoch_4.pth"] != known["epoch_4.pth"]


@pytest.mark.thorough
def test_it_is_the_loop_that_drops_the_rows(whole, listed, tmp_path):
    """The other samples keep their batch and their crops."""
    ids = read(listed)
    line = "            optimizer.zero_grad()\n"
    rest = (
        "            ids = train_loader.batch.ids.tolist()\n"
        f"            rest = [place for place, id in enumerate(ids) if id not in {ids}]\n"
        "            inputs = inputs[rest].contiguous(memory_format=torch.channels_last)\n"
        "            targets = targets[rest]\n"
    )
    by_hand = changed("train.py", tmp_path / "by_hand.py", (line, line + rest))
    words = [word for word in JOB[1:] if "sample_losses" not in word]
    run(by_hand, *words, f"--output_dir={tmp_path}/hand")
    assert sums(tmp_path / "hand")["epoch_4.pth"] == sums(whole)["epoch_4.pth"]


def test_the_receipt_shows_the_samples_as_removed(old, whole, listed):
    ids = read(listed)
    uses = Run(str(old)).find_uses(np.array(ids), STEPS)
    total = sum(map(len, uses.values()))
    judged = run("-m", "launch", "receipt", whole).stdout
    assert f"{total} samples of steps 11" in judged and "removed (--without)" in judged
    assert "unusual" not in judged
    compared = run("-m", "launch", "receipt", old, whole, code=1).stdout
    assert names(compared, "without some samples", "other ids are equal", "other steps are equal")
    shown = run("-m", "launch", "data", whole, "--step=11").stdout
    assert names(shown, "126 samples, 2 removed", "equal")
    rows = {line.split()[1]: line.split() for line in shown.splitlines()[2:]}
    theirs = run("-m", "launch", "data", old, "--step=11").stdout
    others = {line.split()[1]: line.split() for line in theirs.splitlines()[2:]}
    assert {id: others[id] for id in rows} == rows and not rows.keys() & {*map(str, ids[:2])}
    assert "removed (--without)" in run("-m", "launch", "data", whole, f"--sample={ids[0]}").stdout
    assert run("-m", "launch", "data", whole, "--around=12").stdout


@pytest.mark.thorough
def test_a_restart_an_audit_and_a_fork_lack_them_too(whole, listed, tmp_path):
    new = tmp_path / "new"
    words = (*JOB, "--save_every=1", f"--output_dir={new}")
    job = start(*words, f"--without={listed}")
    read_until(job, r"^epoch=\d+ step=12\b")
    job.kill()
    finish(job, -9)
    line = refused(*words)
    assert "removed samples is 3 samples" in line
    other = write(tmp_path / "other.txt", [5])
    assert "removed samples is 3 samples" in refused(*words, f"--without={other}")
    run(*words, f"--without={listed}")
    assert sums(new) == sums(whole)
    shown = run("-m", "launch", "audit", whole, "--steps=17-20").stdout
    assert "equal: 1 of" in shown
    fork = tmp_path / "fork"
    run("jobs/train.py", f"--from={whole}", "--at_step=16", f"--output_dir={fork}")
    assert state(fork, STEPS) == state(whole, STEPS)
    assert (fork / "removed.txt").read_text() == (whole / "removed.txt").read_text()
    more = tmp_path / "more"
    late = write(tmp_path / "late.txt", choose(whole, 18, 1))
    line = refused(
        "jobs/train.py", f"--from={whole}", "--at_step=16", f"--without={late}", f"--output_dir={more}"
    )
    assert names(line, f"--without: {whole} never had 3 samples", "lacks")
    shown = run("-m", "launch", "replay", whole, "--without", late, "--output_dir", more).stdout
    assert names(shown, "state after step 16")
    assert len((more / "removed.txt").read_text().splitlines()) == 4


def test_a_step_without_any_sample_is_left_out(old, tmp_path):
    listed = write(tmp_path / "ids.txt", ids_of(old, 3))
    new = tmp_path / "new"
    shown = run(
        *SMALL, "--max_steps=4", "--save_every=1", f"--without={listed}", f"--output_dir={new}"
    ).stdout
    assert re.search("step 3 is left out: .*samples .*removed", shown)
    parts = {step: line["parts"] for step, line in read_states(str(new)).items()}
    weights = [name for name in parts[2] if name.startswith("model.")]
    assert all(parts[2][name] == parts[3][name] for name in weights)
    assert any(parts[3][name] != parts[4][name] for name in weights)
    judged = run("-m", "launch", "receipt", new).stdout
    assert "128 samples of step 3 were removed" in judged or "128 samples of step 3 was removed" in judged
    assert "--skip_steps" not in judged
    assert "left out" in refused("-m", "launch", "data", new, "--step=3", "--ids")


@pytest.mark.thorough
def test_an_exact_run_has_the_same_bits_on_any_number(tmp_path):
    """Also if a shard, or a whole step, has no sample left."""
    job = "jobs/train_exact.py"
    words = (*QUICK, "--batch_size=16", "--epoch_steps=5", "--epochs=2", "--exact_shards=4", "--keep_every=3")
    run(job, *words, f"--output_dir={tmp_path}/old")
    ids = ids_of(tmp_path / "old", 4)  # 4 shards of 4 samples
    chosen = [*ids[0:4], ids[5], *ids[12:16], *ids_of(tmp_path / "old", 7)]
    listed = write(tmp_path / "ids.txt", chosen)
    run(job, *words, f"--without={listed}", f"--output_dir={tmp_path}/one")
    shown = run_ranks(job, *words, f"--without={listed}", f"--output_dir={tmp_path}/two")[0].stdout
    assert "step 7 is left out" in shown
    known = sums(tmp_path / "one")
    assert sums(tmp_path / "two") == known and sums(tmp_path / "old") != known
    replay = ("-m", "launch", "replay", tmp_path / "old", "--without", listed)
    run(*replay, "--output_dir", tmp_path / "again", "--processes=2")
    assert sums(tmp_path / "again")["epoch_2.pth"] == known["epoch_2.pth"]


@pytest.mark.thorough
def test_what_cannot_be_is_refused_in_one_line(old, listed, tmp_path):
    new = f"--output_dir={tmp_path}/new"
    assert "is not in 0.." in refused(*JOB, f"--without={write(tmp_path / 'far', [10**9])}", new)
    assert "cannot read" in refused(*JOB, f"--without={tmp_path}/none", new)
    assert "line 2 is 'cat.png'" in refused(
        *JOB, f"--without={write(tmp_path / 'words', [1, 'cat.png'])}", new
    )
    assert "has no id" in refused(*JOB, f"--without={write(tmp_path / 'empty', [])}", new)
    assert "without --evaluate" in refused(*JOB, "--evaluate", f"--without={listed}", new)
    text = "--accumulate 2"
    line = refused(
        "jobs/train_text.py", "--accumulate=2", f"--without={listed}", new, f"--data_url={tmp_path}"
    )
    assert text in line
    for result in run_ranks("jobs/train_ddp.py", *JOB[1:], f"--without={listed}", new, code=2):
        assert "needs --exact_shards" in result.stderr or "error" in result.stderr
    line = refused("jobs/train.py", f"--from={old}", "--at_step=16", f"--without={listed}", new)
    assert "in step 11 of" in line and "launch replay" in line

    replay = ("-m", "launch", "replay", old, "--output_dir", tmp_path / "again", "--without")
    unused = sorted({*range(1437)} - {id for step in range(1, 25) for id in ids_of(old, step)})
    if unused:
        shown = run(*replay, write(tmp_path / "unused", unused[:1])).stdout
        assert "never had 1 sample of" in shown and "without them already" in shown
        assert not (tmp_path / "again").exists()
    assert "is not in 0.." in refused(*replay, tmp_path / "far")
    copy = shutil.copytree(old, tmp_path / "copy")
    (copy / "starts.jsonl").unlink()
    assert "starts.jsonl" in refused(
        "-m", "launch", "replay", copy, "--output_dir", tmp_path / "b", "--without", listed
    )
