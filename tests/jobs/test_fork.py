"""A new run begins at a step of an old one, computes the steps between again, and may leave out steps.

The old run has steps 1-24, and the states of steps 8, 16, 20 and 24.
"""

import json
import os
import re
import shutil
import stat

import pytest
import torch

from bootfile.exact import checked_files, files
from bootfile.exact.forked import _Before
from bootfile.ground.exit_codes import DIFFERS, UNVERIFIED
from bootfile.histories import read_states
from bootfile.receipt.reading import read_records
from bootfile.records import read_starts
from tests.conftest import QUICK, environment, finish, names, records, refused, run, run_ranks, start_until
from tests.support.exact import changed
from tests.support.proofs import audit

JOB = (
    "jobs/train.py",
    *QUICK,
    "--batch_size=32",
    "--epoch_steps=6",
    "--report_every=2",
    "--sample_losses=true",
)
FROM = "jobs/train.py"
STEPS = 24
ACCEPTS = "            if checkpoint.accepts(loss):"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Return the folder of the old run, which is read-only."""
    folder = tmp_path_factory.mktemp("old") / "run"
    words = ("--epochs=4", "--save_every=4", "--keep=2", "--keep_every=8", f"--output_dir={folder}")
    run(*JOB, *words)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def content(folder) -> dict:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copy_run(old, folder):
    """Return a copy of a run that may be written."""
    shutil.copytree(old, folder, copy_function=shutil.copyfile)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    return folder


def differs(*words) -> str:
    """Run a job whose steps differ from those of the old run, and return its only line of stderr."""
    [line] = run(*words, code=DIFFERS).stderr.splitlines()
    return line


def state(folder, step: int) -> str:
    return read_states(str(folder))[step]["digest"]


def rate(folder, step: int) -> float:
    [rate] = [line["lr"] for line in records(folder) if line["step"] == step and "lr" in line]
    return rate


def test_a_run_begins_at_a_step_without_a_state(old, tmp_path):
    """The steps between are computed again. With the same options the new run is the old one."""
    before = content(old)
    new = tmp_path / "new"
    shown = run(FROM, f"--from={old}", "--at_step=14", f"--output_dir={new}").stdout
    assert re.search(r"^begins at step 14 of .*/run: steps 9-14 .*again.* compared$", shown, re.M)
    assert re.search(r"^steps 9-14 are those of .*/run; .*6 steps.* 1 state$", shown, re.M)
    assert state(new, STEPS) == state(old, STEPS) and content(old) == before
    [facts] = read_starts(str(new))
    parent = {"folder": os.path.realpath(old), "step": 14, "state": 8, "run": facts["parent"]["run"]}
    assert facts["parent"] == parent and facts["settings"]["batch_size"] == 32
    compared = run("-m", "launch", "receipt", old, new).stdout
    assert "begins at step 14 of" in compared and re.search(r"data equal .*16 steps.* step 9\b", compared)
    judged = run("-m", "launch", "receipt", new).stdout
    assert names(judged, f"begins at step 14 of {os.path.realpath(old)}", "steps 9-14", "again")
    assert "without a record" not in judged
    page = tmp_path / "report.html"
    run("-m", "launch", "report", new, "--to", page)
    assert "step 14 of" in page.read_text()


@pytest.mark.thorough
def test_other_options_count_from_the_step_on(old, tmp_path):
    """The steps between are computed with those of the old run, in a program of its own."""
    new = tmp_path / "new"
    words = (FROM, f"--from={old}", "--at_step=14", "--lr=0.05", f"--output_dir={new}")
    shown = run(*words, "--max_steps=20").stdout
    assert re.search(r"steps 9-14 .*first .*--lr 0\.1\b", shown)
    assert "settings lr=0.05" in shown
    first = read_records(str(new))
    assert first["step"].tolist() == list(range(9, 21))
    run(*words, "--max_steps=22")  # the same command continues; its own schedule has changed again
    known = read_starts(str(new))
    assert [line["step"] for line in known] == [14, 20] and known[0]["parent"] == known[1]["parent"]
    assert not (new / ".fork").exists()
    assert rate(new, 16) < 0.7 * rate(old, 16)


@pytest.mark.thorough
def test_a_step_without_any_state_before_it(old, tmp_path):
    new = tmp_path / "new"
    words = (FROM, f"--from={old}", "--at_step=6", "--epochs=4", f"--output_dir={new}")
    # the threads are those of the run, also where others would be chosen
    [facts] = read_starts(str(old))
    threads = facts["environment"]["threads"]
    other = environment(OMP_NUM_THREADS=str(threads + 1))
    shown = run(*words, env=other).stdout
    assert "steps 1-6 are computed again" in shown and state(new, 12) == state(old, 12)
    # later it is a run as any other: new threads count from a restart on
    words = words[:-2]
    run(*words, "--epochs=5", f"--threads={threads + 1}", f"--output_dir={new}")
    run(*words, "--epochs=6", f"--output_dir={new}")
    used = [start["environment"]["threads"] for start in read_starts(str(new))]
    assert used == [threads, threads + 1, threads + 1]


def test_the_newest_state_is_the_default(old, tmp_path):
    new = tmp_path / "new"
    shown = run(FROM, f"--from={old}", "--epochs=5", f"--output_dir={new}").stdout
    assert re.search(r"^begins at step 24 of .*/run$", shown, re.M)
    assert read_records(str(new))["step"].tolist() == list(range(25, 31))
    compared = run("-m", "launch", "receipt", old, new, code=1).stdout
    assert "no step in common" in compared


def test_a_damaged_state_is_passed_over(old, tmp_path):
    copy = copy_run(old, tmp_path / "copy")
    path = copy / "checkpoints" / "step_16.pt"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    shown = run(FROM, f"--from={copy}", "--at_step=16", f"--output_dir={tmp_path}/new").stdout
    assert "checkpoint refused" in shown and "steps 9-16 are computed again" in shown
    assert state(tmp_path / "new", STEPS) == state(old, STEPS)


def test_a_state_of_another_run_is_not_continued(old, tmp_path):
    """A restart, --from, an audit and an evaluation all refuse it."""
    copy = copy_run(old, tmp_path / "copy")
    for step in (16, 20, 24):
        files.discard(str(copy / "checkpoints" / files.name_of(step)))
    path = str(copy / "checkpoints" / files.name_of(8))
    whole = checked_files.read(path)
    files.write(path, whole | {"run": "f0e1"}, step=8, run="f0e1")
    known = {line["run"] for line in read_states(str(old)).values()}
    line = refused(*JOB, "--epochs=4", f"--output_dir={copy}")
    assert names(line, "step_8.pt", "f0e1", *known, "--from", "--weights")
    line = refused(*JOB, f"--resume={path}", "--evaluate", f"--output_dir={tmp_path}/e")
    assert names(line, "f0e1", *known)
    shown = run(FROM, f"--from={copy}", "--at_step=8", "--epochs=2", f"--output_dir={tmp_path}/new").stdout
    assert re.search("^checkpoint refused: .*step_8.pt: .*f0e1", shown, re.M)
    assert "steps 1-8 are computed" in shown
    assert re.search("^differs: .*step_8.pt: .*f0e1", audit(copy, "--steps=1-8", code=DIFFERS), re.M)
    run(*JOB, f"--weights={path}", "--max_steps=2", f"--output_dir={tmp_path}/weights")
    assert names(run("-m", "launch", "receipt", old, copy, code=1).stdout, "step_8.pt", "f0e1")


def test_what_has_no_record_is_not_known(old, tmp_path):
    """An audit and a fork name the steps that the receipt lacks: here 11-16."""
    copy = copy_run(old, tmp_path / "copy")
    receipt = (copy / "receipt.bin").read_bytes()
    size = len(receipt) // STEPS
    (copy / "receipt.bin").write_bytes(receipt[: 10 * size] + receipt[16 * size :])
    result = tmp_path / "audit.json"
    shown = audit(copy, "--steps=9-16", "--to", result, code=UNVERIFIED)
    facts = json.loads(result.read_text())
    [interval] = facts["computed"]
    assert interval["unknown"] == "11-16" and interval["samples"] == 2 and interval["states"] == 2
    assert facts["exit code"] == UNVERIFIED and names(facts["verdict"], "not known", "11-16")
    assert not re.search("^equal", shown, re.M)
    shown = run(FROM, f"--from={copy}", "--at_step=14", f"--output_dir={tmp_path}/new").stdout
    assert re.search("^warning: .*not known .*steps 9-14 .*steps 11-14 have no record", shown, re.M)
    judged = run("-m", "launch", "receipt", tmp_path / "new").stdout
    assert names(judged, "not known", "steps 11-14 have no record")


def test_the_cause_of_a_difference_is_named_before_hardware(old, tmp_path):
    """The code has changed here: the steps are not computed a second time."""
    other = changed("train.py", tmp_path / "train.py", ("label_smoothing=0.1", "label_smoothing=0.2"))
    result = tmp_path / "audit.json"
    shown = audit(old, "--steps=9-16", f"--job={other}", "--to", result, code=DIFFERS)
    [interval] = json.loads(result.read_text())["computed"]
    assert "train.py has changed" in interval["changes"] and interval["again"] is None
    assert "hardware" not in shown


def test_a_difference_ends_the_run_before_it_is_one_of_its_own(old, tmp_path):
    """Here the code has changed: once the data, once the training."""
    other = changed("train.py", tmp_path / "other.py", ("label_smoothing=0.1", "label_smoothing=0.2"))
    line = differs(other, f"--from={old}", "--at_step=14", f"--output_dir={tmp_path}/a")
    assert names(line, "steps 9-14", "state after step 12", "another", "--at_step 8")
    other = changed("train.py", tmp_path / "data.py", ("augment=True", "augment=False"))
    line = differs(other, f"--from={old}", "--at_step=14", f"--output_dir={tmp_path}/b")
    assert "step 9 had other samples (augmentation)" in line
    line = differs(other, f"--from={old}", "--at_step=14", "--lr=0.05", f"--output_dir={tmp_path}/c")
    assert "step 9 had other samples (augmentation)" in line
    judged = run("-m", "launch", "receipt", tmp_path / "a").stdout
    assert names(judged, "steps 9-14", "again", "not known")
    for name in "abc":
        kept = files.list_newest_first(str(tmp_path / name / "checkpoints"))
        assert [files.step_of(path) for path in kept if files.step_of(path) >= 12] == []


@pytest.mark.thorough
def test_a_kill_between_the_state_and_the_step(old, tmp_path):
    new = tmp_path / "new"
    words = (
        FROM,
        f"--from={old}",
        "--at_step=14",
        "--save_every=1",
        "--report_every=1",
        f"--output_dir={new}",
    )
    job, _, _ = start_until(*words, at=r"^epoch=\d+ step=10/")
    job.kill()
    finish(job, -9)
    shown = run(*words).stdout
    if int(re.search(r"resumed from .*step (\d+) of", shown)[1]) < 14:
        assert "steps 9-14 are those of" in shown
    assert state(new, STEPS) == state(old, STEPS)
    line = refused(FROM, f"--from={old}", "--at_step=16", f"--output_dir={new}")
    assert "began at step 14" in line and "another --output_dir" in line


@pytest.mark.thorough
def test_steps_are_left_out(old, tmp_path):
    """A copy of the job that leaves out the same steps by hand has the same state."""
    new = tmp_path / "new"
    words = (FROM, f"--from={old}", "--at_step=16", f"--output_dir={new}")
    skip = "--skip_steps=18-20,23"
    options = (skip, "--report_every=1", "--save_every=1")
    job, shown, _ = start_until(*words, *options, at=r"^epoch=\d+ step=19/")
    job.kill()
    finish(job, -9)
    assert "steps 18-20 are left out" in shown
    line = refused(*words, "--report_every=1", "--save_every=1")
    assert "list of skipped steps is 18-20,23" in line
    run(*words, skip, "--report_every=1", "--save_every=1")
    # the schedule is that of the step
    assert (
        rate(new, 20) == rate(old, 20) and rate(new, 22) == rate(old, 22) and rate(new, 24) == rate(old, 24)
    )
    states = {step: line["parts"] for step, line in read_states(str(new)).items()}
    weights = [
        {name: part for name, part in states[step].items() if name.startswith("model.")} for step in (17, 20)
    ]
    assert weights[0] == weights[1] and states[20] != states[21]

    skip = "            if step + 1 in (18, 19, 20, 23):\n                loss = loss * float('nan')\n"
    by_hand = changed("train.py", tmp_path / "by_hand.py", (ACCEPTS, skip + ACCEPTS))
    other = copy_run(old, tmp_path / "other")
    for step in (20, 24):
        files.discard(str(other / "checkpoints" / files.name_of(step)))
    run(by_hand, *JOB[1:], "--epochs=4", f"--output_dir={other}")
    assert state(new, STEPS) == state(other, STEPS)

    judged = run("-m", "launch", "receipt", new).stdout
    assert "steps 18-20, 23 were left out (--skip_steps)" in judged and "unusual" not in judged
    compared = run("-m", "launch", "receipt", old, new, code=1).stdout
    assert names(compared, "data different: steps 18-20, 23", "left out", "other steps are equal")
    line = refused("-m", "launch", "data", new, "--step=19", "--ids")
    assert "step 19" in line and "left out" in line
    around = run("-m", "launch", "data", new, "--around=22").stdout
    assert "step 19: left out (--skip_steps)" in around
    assert f"--from {new} --at_step 21 --skip_steps 22 --output_dir NEW" in around
    assert run("-m", "launch", "data", new, "--sample=3").stdout

    again = tmp_path / "again"  # a run that begins in it leaves out the same steps
    run(FROM, f"--from={new}", "--at_step=24", f"--output_dir={again}", "--epochs=5")
    assert state(again, 30)


@pytest.mark.thorough
def test_two_processes(old, tmp_path):
    job = "jobs/train_ddp.py"
    words = (*JOB[1:], "--epochs=3", "--save_every=6", "--keep=1", "--keep_every=6")
    run_ranks(job, *words, f"--output_dir={tmp_path}/old")
    new = ("--from", tmp_path / "old", "--at_step=10", "--skip_steps=12-13")
    shown = run_ranks(job, *new, f"--output_dir={tmp_path}/two")[0].stdout
    assert "steps 7-10 are those of" in shown and "steps 12-13 are left out" in shown
    again = run_ranks(job, *new, f"--output_dir={tmp_path}/again")
    assert len(again) == 2 and state(tmp_path / "again", 18) == state(tmp_path / "two", 18)
    # one process computes the steps between with two, because sums round differently
    shown = run(job, *new, f"--output_dir={tmp_path}/one").stdout
    assert re.search(r"steps 7-10 .*first .*\b2 processes", shown)
    assert state(tmp_path / "one", 18) != state(tmp_path / "two", 18)


@pytest.mark.thorough
def test_an_exact_run_continues_on_any_number(tmp_path):
    job = "jobs/train_exact.py"
    words = (
        *QUICK,
        "--batch_size=256",
        "--epoch_steps=4",
        "--epochs=2",
        "--exact_shards=2",
        "--keep_every=4",
    )
    run(job, *words, f"--output_dir={tmp_path}/old")
    new = ("--from", tmp_path / "old", "--at_step=6", "--skip_steps=7")
    shown = run_ranks(job, *new, f"--output_dir={tmp_path}/two")[0].stdout
    assert "steps 5-6 are those of" in shown
    run(job, *new, f"--output_dir={tmp_path}/one")
    assert state(tmp_path / "one", 8) == state(tmp_path / "two", 8)


def test_a_loop_that_does_not_ask_is_refused(old, tmp_path):
    other = changed("train.py", tmp_path / "other.py", (ACCEPTS, "            if True:"))
    line = refused(other, f"--from={old}", "--at_step=16", "--skip_steps=18", f"--output_dir={tmp_path}/new")
    assert names(line, "--skip_steps: step 18", "left out", "loop changes", "accepts()")


@pytest.mark.parametrize("words, text", [
    (("--at_step=14",), "--at_step needs --from"),
    (("--skip_steps=14",), "--skip_steps needs --from"),
    (("--from=OLD", "--at_step=99"), "has the steps 1-24"),
    (("--from=OLD", "--at_step=14", "--skip_steps=14-16"), "after step 14"),
    (("--from=OLD", "--at_step=16", "--skip_steps=23-25"), "ends at step 24"),
    (("--from=OLD", "--skip_steps=16-14"), "400-420"),
    (("--from=OLD", "--skip_steps="), "400-420"),
    (("--from=OLD", "--seed=7"), "--seed is 0"),
    (("--from=OLD", "--at_step=14", "--seed=7"), "--seed 7: that of"),
    (("--from=OLD", "--resume=never"), "leave out --resume"),
    (("--from=s3://runs/old",), "launch fetch"),
    (("--from=NONE",), "(starts.jsonl is missing)"),
], ids=lambda words: " ".join(words) if isinstance(words, tuple) else "")  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(old, tmp_path, words, text):
    words = [word.replace("OLD", str(old)).replace("NONE", str(tmp_path / "none")) for word in words]
    line = refused(FROM, *words, f"--output_dir={tmp_path}/new")
    assert text in line, line
    if "--from" in words[0] and str(old) in words[0]:
        assert "expected a new folder" in refused(FROM, f"--from={old}", f"--output_dir={old}")


def test_an_audit_computes_steps_again(old, tmp_path):
    """The states of steps 8, 16 and 20 begin intervals; a state that was altered is found."""
    before = content(old)
    result = tmp_path / "audit.json"
    shown = audit(old, "--share=all", "--to", result)
    verdicts = r"^(steps \d+-\d+|equal):"  # not how long a busy machine made a step wait
    assert re.findall(verdicts, shown, re.MULTILINE) == [
        "steps 1-8", "steps 9-16", "steps 17-20", "steps 21-24", "equal"
    ]  # fmt: skip
    facts = json.loads(result.read_text())
    assert facts["exit code"] == 0 and facts["share of the steps"] == 1 and content(old) == before
    shown = audit(old, "--steps=18-19")
    assert shown.startswith("steps 17-19: equal")
    assert len(re.findall(verdicts, audit(old, "--seed=3"), re.MULTILINE)) == 2

    altered = copy_run(old, tmp_path / "altered")
    path = str(altered / "checkpoints" / "step_16.pt")
    facts = checked_files.facts_of(path)
    whole = checked_files.read(path)
    weights = whole["objects"]["model"]
    weights[next(name for name in weights if name.endswith("weight"))].view(-1)[0] += 1e-3
    files.write(path, whole, step=16, run=facts["run"])
    shown = audit(altered, "--steps=9-20", "--to", result, "--force", code=DIFFERS)
    # its steps are computed from the state before it
    assert "steps 9-20: equal" in shown
    [line] = json.loads(result.read_text())["altered"]
    assert re.search(r"step_16\.pt: .*state of step 16 is not .*recorded .*\(model\.", line)
    assert re.search(r"^differs: .*step_16\.pt", shown, re.M)
    assert "no run of a job" in refused("-m", "launch", "audit", tmp_path)


def test_several_losses_of_a_step_that_is_left_out_add_nothing_to_gradients_that_wait():
    model = torch.nn.Linear(1, 1, bias=False)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    model.weight.grad = torch.ones(1, 1)  # a batch before left it
    before = _Before(objects, waits=True)
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        before.restore()
    assert model.weight.grad.item() == 1
