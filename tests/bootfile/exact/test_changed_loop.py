"""A loop of one's own that was changed between two starts continues by name, or is refused, or says so."""

import re
import subprocess

import pytest

from bootfile.exact import other_start
from tests.conftest import ROOT, environment, finish, free_port, read_until, run, start

# A start of 16 steps, 8 of an epoch, with a save after each step. Each part may be replaced.
LOOP = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from bootfile import Exact, torch_loader

torch.manual_seed(0)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
train_set = TensorDataset(x, x.sum(1, keepdim=True))
loader = torch_loader(DataLoader(train_set, 8, shuffle=True), torch.device("cpu"), epochs=2)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.b = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.head(torch.relu(self.b(torch.relu(self.a(x)))))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = Exact("OUT", loader, model=model, optimizer=optimizer, save_every=1)
step = run.resume()
if step:
    print("momentum", optimizer.state[model.a.weight]["exp_avg"].sum().item())
for _ in loader.epochs_from(step):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        if run.end_step().save:
            run.save()
        if step == int(sys.argv[1]):
            run.saver.collect(wait=True)
            print("momentum", optimizer.state[model.a.weight]["exp_avg"].sum().item())
            os._exit(0)
run.close()
"""
ENDS_AT = 11  # within the second epoch
PATH = {"PYTHONPATH": str(ROOT)}


def change(*pairs):
    loop = LOOP
    for old, new in pairs:
        assert old in loop
        loop = loop.replace(old, new)
    return loop


def begin(folder, *pairs):
    """Run the first start. Return what it prints."""
    (folder / "loop.py").write_text(change(*pairs))
    return run("loop.py", str(ENDS_AT), cwd=folder, env=environment(**PATH)).stdout


def go_on(folder, *pairs, code=0):
    """Start the changed loop again, and return what it prints and its error."""
    (folder / "loop.py").write_text(change(*pairs))
    ended = run("loop.py", str(ENDS_AT + 1), cwd=folder, env=environment(**PATH), code=code)
    return ended.stdout + ended.stderr


def find_momentum(text):
    return next(line for line in text.splitlines() if line.startswith("momentum"))


LINE_A = "        self.a = torch.nn.Linear(8, 8)\n"
LINE_B = "        self.b = torch.nn.Linear(8, 8)\n"


def test_a_loop_that_was_not_changed_continues_with_the_state_of_its_optimizer(tmp_path):
    before = begin(tmp_path)
    assert find_momentum(go_on(tmp_path)) == find_momentum(before)


def groups(*names):
    parts = ", ".join(f"{{'params': model.{name}.parameters()}}" for name in names)
    return "AdamW(model.parameters()", f"AdamW([{parts}]"


def add(words):
    made = "one, two = torch.Generator(), torch.Generator()"
    return "step = run.resume()", f"{made}\nrun.add({words})\nstep = run.resume()"


OTHER_ORDER = r"its optimizer has a\.weight where this run has \w+\.\w+ [^;\n]*position"
LIST = r"add\(parts=\.\.\.\) .*\bstate_dict\(\).*\bload_state_dict\(\).*\blist\b"
REFUSED = [  # change before the first start, change before the second one, reason
    (groups("a", "b"), groups("b", "a"), r"has a\.weight where this run has b\.weight \(group 0\)"),
    (add("one=one, two=two"), add("two=two, one=one"), r"generators [^;\n]*\bone, two\b[^;\n]*\btwo, one\b"),
    (None, add("parts=[model.a]"), LIST),
    (None, ("x.sum(1, keepdim=True)", "x.sum(1, keepdim=True) + (x[:, :1] > 2)"), "its training data is"),
    (None, ("TensorDataset(x,", "TensorDataset(x * 2,"), "its training data is"),
]
for changed in (
    (LINE_A + LINE_B, LINE_B + LINE_A),
    ("AdamW(model.parameters()", "AdamW(reversed(list(model.parameters()))"),
    ("AdamW(model.parameters()", "AdamW(sorted(model.parameters(), key=torch.numel)"),  # other shapes
):
    REFUSED.append(pytest.param(None, changed, OTHER_ORDER, marks=pytest.mark.thorough))


@pytest.mark.parametrize(("before", "after", "reason"), REFUSED)
def test_a_change_that_cannot_be_continued_is_refused_by_name(before, after, reason, tmp_path):
    begin(tmp_path, *[before] * bool(before))
    assert re.search(reason, go_on(tmp_path, after, code=1))


@pytest.mark.thorough
def test_hyperparameters_that_were_edited_have_a_line(tmp_path):
    begin(tmp_path)
    edited = ("lr=1e-2)", "lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)")
    shown = go_on(tmp_path, edited)
    assert re.search(r"betas .*optimizer, group 0\b.*\(0\.9, 0\.999\).*\(0\.8, 0\.99\)", shown)
    assert re.search(r"weight_decay .*optimizer, group 0\b.*\b0\.01\b.*\b0\.1\b", shown)
    assert not re.search("betas|weight_decay", go_on(tmp_path, edited))


OWN_SET = (
    "train_set = TensorDataset(x, x.sum(1, keepdim=True))",
    "class Own(torch.utils.data.Dataset):\n"
    "    def __len__(self):\n"
    "        return 10**6\n"
    "    def __getitem__(self, id):\n"
    "        place = id % 64\n"
    "        return x[place] * 1, x[place].sum(0, keepdim=True)\n"
    "train_set = Own()",
)
FEW = ("DataLoader(train_set, 8, shuffle=True)", "DataLoader(train_set, 8, sampler=range(1001, 1065))")


@pytest.mark.thorough
def test_a_sample_that_changed_is_seen_when_a_batch_is_read_again(tmp_path):
    """No fingerprint covers it: 64 of a million items are read."""
    begin(tmp_path, OWN_SET, FEW)
    shown = go_on(tmp_path, OWN_SET, FEW)
    assert "resumed from" in shown
    error = go_on(tmp_path, OWN_SET, FEW, ("x[place] * 1", "x[place] * (1 + (id == 1003))"), code=1)
    assert re.search(r"step 9 .*read again.* samples .*\bnot\b", error)


@pytest.mark.thorough
def test_items_that_are_not_stable_have_a_warning_and_are_not_refused(tmp_path):
    unstable = ("x[place] * 1", "x[place] * int.from_bytes(os.urandom(1), 'big')")
    line = "of Own differs"
    assert line in begin(tmp_path, OWN_SET, FEW, unstable)
    assert line in go_on(tmp_path, OWN_SET, FEW, unstable)


def test_another_number_of_processes_is_said_first(tmp_path):
    begin(tmp_path)
    joined = ("torch.manual_seed(0)", "torch.distributed.init_process_group('gloo')\ntorch.manual_seed(0)")
    (tmp_path / "loop.py").write_text(change(joined))
    variables = environment(**PATH, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2")
    jobs = [start("loop.py", "99", cwd=tmp_path, env=variables | {"RANK": rank}) for rank in "01"]
    for job in jobs:
        assert re.search(r"\b1 processes[^;\n]* 2\b", finish(job, 1).stderr)


@pytest.mark.thorough
def test_two_loops_with_one_folder(tmp_path):
    waits = (
        "    for inputs, targets in loader:",
        "    print('training', flush=True)\n    sys.stdin.read()\n    for inputs, targets in loader:",
    )
    (tmp_path / "loop.py").write_text(change(waits))
    first = start("loop.py", "99", cwd=tmp_path, env=environment(**PATH), stdin=subprocess.PIPE)
    try:
        read_until(first, "training")
        (tmp_path / "loop.py").write_text(LOOP)
        error = run("loop.py", "99", cwd=tmp_path, env=environment(**PATH), code=1).stderr
        assert re.search(r"OUT belongs to another run\b.*running", error)
        ranked = environment(**PATH, RANK="1", WORLD_SIZE="2")
        error = run("loop.py", "99", cwd=tmp_path, env=ranked, code=1).stderr
        assert re.search("OUT belongs .*RANK=1 WORLD_SIZE=2.*init_process_group", error)
    finally:
        first.kill()
        first.wait()
    shown = go_on(tmp_path)  # a killed one does not keep the folder
    assert re.search(r"warning: .*without a save.* step 1\b", shown)


@pytest.mark.thorough
def test_a_script_and_modules_that_have_changed_are_named(tmp_path):
    rate = ("import os,", "import rate, other\nimport os,")
    (tmp_path / "rate.py").write_text("RATE = 1\n")
    (tmp_path / "other.py").write_text("OTHER = 1\n")
    begin(tmp_path, rate)
    assert "changed" not in go_on(tmp_path, rate)
    (tmp_path / "rate.py").write_text("RATE = 2\n")
    line = "has changed"
    assert f"warning: rate {line}" in go_on(tmp_path, rate)
    after = go_on(tmp_path)  # without the modules, which are not compared
    assert f"warning: loop.py {line}" in after and "rate" not in after


def test_many_changed_modules_are_one_line():
    before = dict.fromkeys("abcde", "0")
    assert other_start.describe_changes(before, before | {"a": "1", "c": "1"}) == "a, c have changed"
    every = dict.fromkeys("abcdef", "1")
    assert other_start.describe_changes(before, every) == "a, b and 3 more modules have changed"
    assert not other_start.describe_changes({}, every)
