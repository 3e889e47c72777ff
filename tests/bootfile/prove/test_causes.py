"""`prove` names the cause of a difference: what a restart begins with, before the tensors that differ."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from bootfile.exact.kinds import COUNTER, OTHER, find_kind
from bootfile.ground.errors import BadInput
from bootfile.prove import causes, runs, trial, verdict
from bootfile.prove.cases import ALL_DAMAGED, DAMAGED, KILLED, THREADS, Case
from bootfile.prove.job import Job, change
from bootfile.receipt import weights
from bootfile.receipt.compare import Line, find_files
from tests.conftest import ROOT, cases, environment, names, run
from tests.support import proofs

SCRIPT = Path(__file__).parent / "usual_bugs.py"
TRACED = ROOT / "bootfile" / "prove" / "traced.py"
CAUSES = {  # bug of the script -> the cause
    "scheduler": r".*learning rate .*\(step \d+: 0.005, .* 0.0025\): is the scheduler .*"
    r"\? last.pt has model, ema, optimizer, scaler, progress,",
    "cosine": r".*learning rate .*: is the scheduler ",
    "warmup": r".*learning rate .*\(step \d+: 0.0005, .*the step of a warm-up",
    "optimizer": r"the optimizer has no state at step \d+ .*: .*checkpoint\? last.pt",
    "sgd_optimizer": r"the optimizer has no state at step \d+ .*: .*checkpoint",
    "all": r"the optimizer has no state at step \d+ .*: .*checkpoint",
    "epoch": r"the order .* begins again, step 43 .*batch of step 1: .*epoch, .*"
    r"trained 72 steps, .* 30: .*epoch, .*step, .*checkpoint",
    "order": r"the order .* begins again, .*: .*epoch, the place in",
    "loader_generator": r"the order .* begins again, .*sampler .*generator ",
    "shuffle": r"the order .* begins again, .*, or torch.get_rng_state\(\), if shuffle=True",
    "repeated_step": r"step \d+ .*batch of the step before: .*checkpoint .*too low",
    "accumulation": r"the gradient of step \d+ .* 1 in place of 2 batches: .*accumulated",
    "dropout": r"the random numbers of torch differ .*\(dropout\): .*torch.get_rng_state\(\)",
    "augmentation": r"the random numbers of torch differ .*batch .*torch.get_rng_state",
    "numpy": r"the random numbers of NumPy differ .*: .*np.random.get_state\(\)",
    "python": r"the random numbers of Python differ .*: .*random.getstate\(\)",
    "mask_generator": r"step 43 .*batch .*reference never had, .*generator",
    "scaler": r".*GradScaler differs .*: 1024, .* 4096: .*the scaler ",
    "buffers": r".*buffers .*\(statistics of BatchNorm\) differ",
    "ema": r"all steps are equal, and ema differs: .*\? last.pt has model, optimizer,",
    "best": r"all steps are equal, and best.pt differs: .*best result",
    "patience": r"all steps are equal up to .*early stopping",
    "none": "",
}


def read_steps(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# a bug of each part of a state
EACH_PART = ("optimizer", "dropout", "order", "epoch")


@pytest.mark.skipif(torch.__version__ < "2.3", reason="the script uses torch.amp.GradScaler of torch 2.3")
@pytest.mark.parametrize("bug", cases(CAUSES, *CAUSES.keys() - EACH_PART))
def test_the_cause_of_a_usual_bug_is_named(bug, tmp_path):
    """The script is killed after the 7th checkpoint, and continues from it."""
    words = (SCRIPT, "--bug", bug, "--out")
    run(TRACED, tmp_path / "reference.jsonl", *words, "reference", cwd=tmp_path)
    run(*words, "restarted", "--saves=7", cwd=tmp_path, code=-signal.SIGKILL)
    saved = {"last.pt": weights.load(str(tmp_path / "restarted" / "last.pt"))}
    run(TRACED, tmp_path / "restarted.jsonl", *words, "restarted", "--resume", cwd=tmp_path)
    folders = str(tmp_path / "reference"), str(tmp_path / "restarted")
    differences = weights.find_differences(*folders, find_files(folders[0], "*.pt"))
    assert bool(differences) == (bug != "none")
    reference = read_steps(tmp_path / "reference.jsonl")
    restarted = read_steps(tmp_path / "restarted.jsonl")
    text = causes.explain(reference, restarted, causes.describe_saved(saved), differences)
    assert re.match(CAUSES[bug], text), text
    assert bug == "none" or text


@pytest.mark.skipif(torch.__version__ < "2.3", reason="the script uses torch.amp.GradScaler of torch 2.3")
def test_the_verdict_begins_with_the_cause(tmp_path):
    shutil.copy(SCRIPT, tmp_path / "train.py")
    words = ("train.py", "--compare", "out/*.pt", "--resume_with=--resume", "--kills=2", "--", "--bug")
    shown = proofs.prove(*words, "cosine", cwd=tmp_path, code=20)
    [line] = re.findall("^differs: .*", shown, re.MULTILINE)
    # the cosine changes the rate in each epoch, so a restart differs wherever the kill was
    assert re.match(
        r"differs: killed and restarted: .*(rate|param_groups.0.lr) .*: is the scheduler ", line
    ), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


STEPS_OF_TWO = """
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
first = 0
if "--resume" in sys.argv:
    saved = torch.load("out/last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
os.makedirs("out", exist_ok=True)
last = int(os.environ.get("LAST", 6))
for epoch in range(first, last):
    loss = (model(torch.ones(1, 2)) - epoch).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "out/last.pt")
"""


@pytest.mark.thorough
def test_a_kill_where_the_bug_has_no_effect_does_not_hide_the_cause(tmp_path, monkeypatch):
    """A scheduler that begins again is right after an even number of epochs: only an odd one shows the cause.
    Without the second kill the line asked for the model, which is in the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(STEPS_OF_TWO)
    root = tmp_path / "root"
    for name, last in (("at-kill-1", 2), ("at-kill-2", 3), ("reference", 6), ("killed", 3)):
        run("train.py", cwd=tmp_path, env=environment(LAST=str(last)))
        if name == "killed":
            run("train.py", "--resume", cwd=tmp_path)
        shutil.move(tmp_path / "out", root / name)
    job = Job("train.py", [], str(root), 2, compare="out/*.pt", resume_with="--resume")
    cause = job.find_cause(Case("killed", kills=2))
    assert re.match(r".*learning rate differs .*\(step 5: 0\.005, .*reference 0\.0025\)", cause), cause


@pytest.mark.parametrize(("part", "count"), [("weights", 1), ("state", 1), ("data", 0), ("", 0)])
def test_another_number_of_threads_is_no_excuse_for_a_restart_that_fails(part, count):
    """A second restart may be lucky: it would be called exact."""
    killed = Case(KILLED, kills=1, changes=(THREADS,))
    row = verdict.Row(killed, "", [Line(part, False, "own.py --resume ended with 1: EOFError")], "differs")
    assert len(verdict.needs_more(row)) == count
    assert verdict.find_difference([row]) == row


@pytest.mark.parametrize("depends", [True, False])
def test_a_lucky_restart_with_the_same_threads_is_no_excuse(depends):
    """Only a run without a kill shows whether the threads matter."""
    line = Line("weights", False, "last.pt differs: optimizer.param_groups.0.lr (0.1, 0.2)")
    killed = Case(KILLED, kills=1, changes=(THREADS,))
    rows = [verdict.Row(killed, "", [line], "differs")]
    [lucky] = verdict.needs_more(rows[0])
    rows.append(verdict.Row(lucky, "", [line._replace(equal=True)], "equal"))
    [other_threads] = verdict.needs_more(rows[1])
    result = "differs" if depends else "equal"
    rows.append(verdict.Row(other_threads, "", [line._replace(equal=not depends)], result))
    assert (verdict.find_difference(rows) is None) == depends
    assert verdict.find_difference(rows) in (None, rows[0])


@pytest.mark.parametrize(
    ("settings", "cudnn", "cause"),
    [
        ("defaults", "91900", ["H200:", "torch.use_deterministic_algorithms(True)"]),
        ("deterministic", "91900 benchmark", ["H200: cuDNN", "torch.backends.cudnn.benchmark = False"]),
        ("deterministic", "91900", []),
    ],
)
def test_two_equal_runs_with_other_bits_on_a_gpu_have_a_cause(settings, cudnn, cause, tmp_path):
    """An H200 gave other bits in two runs of train.py."""
    start = {"step": 0, "settings": {}, "environment": {"GPU": "H200", "settings": settings, "cuDNN": cudnn}}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    said = runs._explain_bits(str(tmp_path))
    assert bool(said) == bool(cause) and names(said, *cause)


def test_the_same_order_in_each_epoch_is_noted(tmp_path):
    """A restart does not show it: it is equal."""
    script = SCRIPT.read_text()
    for text, count in ((script, 0), (script.replace("sampler.set_epoch(epoch)", "pass"), 1)):
        (tmp_path / "train.py").write_text(text)
        findings = runs._lint(str(tmp_path / "train.py"))
        assert sum(runs._SAME_ORDER in line for line in findings) == count


def test_the_files_of_a_checkpoint_are_named():
    weight = torch.ones(2)
    model = {"model": {"weight": weight}, "epoch": 1}
    saved = [{"last.pt": model}, {"epoch_1.pt": model, "epoch_2.pt": model, "best.pt": {"weight": weight}}]
    saved += [{"model.pt": {"weight": weight}, "rest.pt": model}, {"best.pt": model}, {}]
    assert [str(causes.describe_saved(states)) for states in saved] == [
        " last.pt has model and epoch", " epoch_2.pt has model and epoch", " It has model.pt and rest.pt",
        "", "",
    ]  # fmt: skip


def test_without_steps_the_files_name_the_cause(tmp_path):
    """For example, other processes than that of the script have the optimizer."""
    for folder, rate in (("a", 0.1), ("b", 0.2)):
        (tmp_path / folder).mkdir()
        groups = {"state": {}, "param_groups": [{"lr": rate, "params": [0]}]}
        model = {"0.weight": torch.tensor([rate, 1.0])}
        state = {"model": model, "optimizer": groups, "loss": rate, "step": 9}
        torch.save(state, tmp_path / folder / "last.pt")
    differences = weights.find_differences(str(tmp_path / "a"), str(tmp_path / "b"), ["last.pt"])
    assert [each.name for each in differences] == ["optimizer.param_groups.0.lr", "loss", "model.0.weight"]
    expected = "last.pt differs: optimizer.param_groups.0.lr (0.1, 0.2), and 2 more"
    assert weights.describe(differences) == expected
    cause = causes.explain([], [], causes.describe_saved({"last.pt": state}), differences)
    assert names(
        cause, "optimizer.param_groups.0.lr", "scheduler", "last.pt has model, optimizer, loss and step"
    )
    del state["optimizer"]
    cause = causes.explain([], [], causes.describe_saved({"last.pt": state}), differences[1:])
    assert re.match(r"is the optimizer .*checkpoint\?", cause)
    assert causes.explain([], [], causes.describe_saved({}), differences[1:]) == ""


def test_states_of_random_numbers_are_compared(tmp_path):
    """Scripts save arrays of NumPy, and lists of 625 numbers."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        state = {"numpy": np.random.get_state(), "large": np.arange(5000), "weight": torch.ones(2)}
        state["large"][2500] = folder == "b"  # in the middle, which the text of an array leaves out
        torch.save(state, tmp_path / folder / "last.pt")
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    if not hasattr(torch.serialization, "safe_globals"):  # torch before 2.5 reads no array of NumPy safely
        with pytest.raises(BadInput, match="cannot be compared"):
            weights.find_differences(*folders, ["last.pt"])
        return
    differences = weights.find_differences(*folders, ["last.pt"])
    assert [each.name for each in differences] == ["large"]


def test_all_that_an_optimizer_saves_is_compared(tmp_path):
    """Lookahead, for example, saves slow weights with the state and the groups."""
    torch.save({"optimizer": {"state": {}, "param_groups": [], "slow": torch.ones(2)}}, tmp_path / "last.pt")
    assert [*weights.read_parts(str(tmp_path / "last.pt"))] == ["optimizer.slow"]


ONCE = """
import os, sys, time, torch
os.makedirs("out", exist_ok=True)
weight, first = torch.ones(4), 0
if "--resume" in sys.argv:
    saved = torch.load("out/last.pt")
    weight, first = saved["weight"], saved["step"]
for step in range(first, 20):
    weight = weight * 0.9 + step
torch.save({"weight": weight, "step": 20}, "out/new")
os.replace("out/new", "out/last.pt")
time.sleep(0.5)  # a kill comes after the training
"""


@pytest.mark.thorough
@pytest.mark.parametrize("pause", ["", "time.sleep(0.3)\n"])
def test_a_restart_that_only_writes_what_it_has_read_proves_nothing(pause, tmp_path):
    """pause: before the file has its name. A kill waits for it: nothing could continue before."""
    (tmp_path / "own.py").write_text(ONCE.replace("os.replace(", f"{pause}os.replace("))
    words = ("own.py", "--compare", "out/*.pt", "--resume_with=--resume", "--kills=1")
    shown = proofs.prove(*words, cwd=tmp_path, code=21)
    assert re.search("^unverified: no restart .*train .*: ", shown, re.MULTILINE)


def test_the_linter_names_the_line_of_a_bug_that_was_found(tmp_path, monkeypatch):
    """`prove` prints it below a verdict that differs, for a script without Bootfile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(STEPS_OF_TWO)
    assert runs._lint("train.py")[0].startswith("train.py:20: R103 scheduler ")
    (tmp_path / "train.py").write_text("not Python")
    assert runs._lint("train.py") == []


# The first two runs, which are not killed, are slow. In each later one all files but two are written at once.
FAST_END = """
import os, time, torch
os.makedirs("out", exist_ok=True)
weight, first = torch.ones(4), 0
if os.path.exists("out/last.pt"):
    saved = torch.load("out/last.pt")
    weight, first = saved["weight"], saved["step"]
runs = os.path.join(os.path.dirname(__file__), "runs")
with open(runs, "a") as file:
    file.write("+")
is_slow = os.path.getsize(runs) <= 2
for step in range(first, 10):
    weight = weight * 0.9 + step
    torch.save({"weight": weight, "step": step + 1}, "out/new")
    os.replace("out/new", "out/last.pt")
    if is_slow:
        time.sleep(0.2)
    elif step <= 1:  # the fifth start is killed here
        time.sleep(100 if step == 1 and os.path.getsize(runs) == 5 else 2)
"""


@pytest.mark.thorough
def test_a_kill_that_comes_too_late_is_followed_by_an_earlier_one(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(FAST_END)
    monkeypatch.setattr(trial, "choose_steps", lambda count, first, last, gap: [float(last)] * count)
    monkeypatch.setattr(trial, "_POLL", 0.05)  # no kill comes between the files that are written at once
    words = ("own.py", "--compare", "out/*.pt", "--resume_with=", "--kills=1")
    shown = proofs.prove(*words, cwd=tmp_path)
    assert re.search(r"a SIGKILL .*restart: after 2 of .*\b\d+ writes", shown)


def test_a_damage_changes_each_kind_of_tensor():
    weight = torch.nn.Parameter(torch.ones(4))
    state = {
        "weight": weight,
        "tied": weight.detach(),  # the same memory
        "repeated": torch.ones(1).expand(90),  # no copy can change it
        "mask": torch.full((50,), -math.inf),  # would stay as it is
        "zeros": torch.zeros(40),
    }
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    assert change(state, DAMAGED) == change(state, ALL_DAMAGED) == "weight"
    assert torch.equal(state["repeated"], before["repeated"])
    assert torch.equal(state["weight"], state["tied"]) and not torch.equal(state["weight"], before["weight"])


def test_a_weight_with_the_name_of_a_counter_is_no_cause_before_its_effects():
    assert find_kind("scaler.scale") == find_kind("optimizer.state.0.step") == COUNTER
    assert find_kind("model.1.scale") == OTHER
