"""`bootfile fix --exact` makes a loop that continues exactly, or names what it cannot place."""

import signal
import textwrap

import pytest
import torch

from bootfile.fix import cli
from bootfile.fix.edits import Script
from bootfile.fix.exact_loop import make_exact
from tests.fix.loops import CLASS, HELPER, MAIN, MODULE, SCRIPTS, change, describe, is_equal, refuse, run_all

pytestmark = pytest.mark.rounding

# MODULE with the lines of guides/own_loop.md, by hand
BY_HAND = MODULE
for old, new in [
    ("import torch\n", "import torch\nfrom bootfile import Exact, torch_loader\n"),
    ("model =", "loader = torch_loader(loader, torch.device('cpu'), seed=1, epochs=3)\nmodel ="),
    (
        "for epoch in range(3):",
        "run = Exact('OUT', loader, model=model, optimizer=optimizer, scheduler=scheduler)\n"
        "for epoch in loader.epochs_from(run.resume()):",
    ),
    ("    scheduler.step()", "        if run.end_step().save:\n            run.save()\n    scheduler.step()"),
    ("torch.save", "run.close()\ntorch.save"),
]:
    BY_HAND = BY_HAND.replace(old, new, 1)
BEGINS = "    best, steps = 0.0, 0\n"
LOADS = """
state = torch.load({path})
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
start = state["epoch"] + 1
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of all runs: each script without a kill ("whole"), and stopped at step 13 and killed
    at step 18 ("killed")."""
    root = tmp_path_factory.mktemp("runs")
    groups = []
    for name, text in [*SCRIPTS.items(), ("by_hand", BY_HAND)]:
        for kind in ("whole",) if name == "by_hand" else ("whole", "killed"):
            folder = root / f"{name}_{kind}"
            folder.mkdir()
            new = text if name == "by_hand" else change(make_exact, folder, text)
            (folder / "train.py").write_text(new)
            command = (folder, "train.py", "weights.pt")
            if kind == "killed":
                groups.append([describe(*command, step=13, signal=signal.SIGTERM)])
                groups.append([describe(*command, step=18, signal=signal.SIGKILL)])
            groups.append([describe(*command)])
    codes = run_all(groups)
    logs = {path.parent.name: path.read_text() for path in root.glob("*/log.txt")}
    assert codes == [[0], [143], [-9], [0]] * len(SCRIPTS) + [[0]], (codes, logs)
    return root


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_and_continued_it_has_the_same_weights(runs, name):
    whole, killed = (torch.load(runs / f"{name}_{kind}" / "weights.pt") for kind in ("whole", "killed"))
    whole, killed = (state.get("model", state) for state in (whole, killed))
    assert is_equal(whole, killed)
    first, last = ((runs / f"{name}_{kind}" / "log.txt").read_text() for kind in ("whole", "killed"))
    # the last line has counters, best results and the number of the epoch
    if name in ("main", "class"):
        assert first.splitlines()[-1] == last.splitlines()[-1]


def test_it_has_the_weights_of_a_loop_that_was_changed_by_hand(runs):
    fixed, by_hand = (torch.load(runs / f"{name}_whole" / "weights.pt") for name in ("module", "by_hand"))
    assert is_equal(fixed, by_hand)


def test_the_lines_are_those_of_the_guide(tmp_path):
    lines = change(make_exact, tmp_path, MODULE).splitlines()
    new = [line for line in lines if line not in MODULE.splitlines()]
    assert new[0] == "from bootfile import Exact, torch_loader"
    for text in ("run.loader.epochs_from(run.resume())", "if run.end_step().save:", "run.close()"):
        assert any(text in line for line in new)
    gone = [line for line in MODULE.splitlines() if line not in lines]
    assert gone == ["for epoch in range(3):", "    for i, (x, y) in enumerate(loader):"]


def test_the_command_prints_a_diff_or_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new, path, old = change(make_exact, tmp_path, MODULE), tmp_path / "train.py", tmp_path / "train.py.orig"
    assert cli.main(["--exact", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "+run.close()" in out and "-for epoch in range(3):" in out and path.read_text() == MODULE
    assert cli.main(["--exact", "train.py", "--write"]) == 0
    assert path.read_text() == new and old.read_text() == MODULE
    # what it cannot place is named
    old.unlink()
    path.write_text(text := HELPER.replace("            continue", "            return total"))
    assert cli.main(["--exact", "train.py", "--write"]) == 1
    assert "train.py: not placed: line 25: `return`" in capsys.readouterr().out
    assert path.read_text() == text and not old.exists()


REFUSED = {
    "another loader": (MODULE.replace("loader = DataLoader(", "loader = load("), "line 15"),
    "a loop over steps": (MODULE.replace("for epoch in range(3):", "epoch = 0\nwhile epoch < 3:"), "line 16"),
    "epochs of a list": (MODULE.replace("range(3)", "sys.argv[2:]"), "line 15"),
    "a pair that is not taken apart": (
        MODULE.replace(
            "for i, (x, y) in enumerate(loader):", "for pair in enumerate(loader):\n        x, y = pair[1]"
        ),
        "line 17",
    ),
    "a starred target": (MODULE.replace("(x, y) in", "(x, *y) in"), "line 17"),
    "a return in the loop": (HELPER.replace("            continue", "            return total"), "line 25"),
    "workers that stay": (MAIN.replace("num_workers=0", "num_workers=1, persistent_workers=True"), "line 31"),
    "a restart of its own": (
        MAIN.replace(BEGINS, BEGINS + textwrap.indent(LOADS.format(path='"all.pt"'), "    ")),
        "line 37",
    ),
    "one epoch": (CLASS.replace("self.train_epoch(epoch)", "pass\n        self.train_epoch(0)"), "line 23"),
    "a loop that also evaluates": (
        HELPER.replace(
            "        lowest =", "        train_one_epoch(model, other, optimizer, scaler)\n        lowest ="
        ).replace("    lowest =", "    other = DataLoader(Rows(), batch_size=6)\n    lowest =", 1),
        "line 42",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_names_what_it_cannot_place_and_changes_nothing(case, tmp_path):
    text, line = REFUSED[case]
    lines = refuse(make_exact, tmp_path / "train.py", text)
    assert any(one.startswith(line) for one in lines), lines


def test_a_restart_that_an_option_asks_for_may_stay(tmp_path):
    loads = textwrap.indent(LOADS.format(path="args.resume"), "        ")
    text = MAIN.replace(BEGINS, f"{BEGINS}    start = 1\n    if args.resume:{loads}")
    text = text.replace("range(1, args", "range(start, args")
    (tmp_path / "train.py").write_text(text)
    script = Script(str(tmp_path / "train.py"), text.encode())
    notes = make_exact(script)
    assert any("without `args.resume`" in note for note in notes), notes
    new = script.render().decode()
    assert "epochs=args.epochs + 1 - start)" in new and "epoch += start - 1" in new


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("/ len(loader)", "/ i", "i is not set"),
        ("        total += loss.item()", "        total += 1", None),
        (
            'print(f"epoch {epoch}: {total / len(loader):.4f}")',
            "print(loss.item())",
            "loss is not set",
        ),
        ("{total / len(loader):.4f}", "{1 / total:.4f}", "total is 0"),
        ('print(f"epoch', 'x /= total; print(f"epoch', "total is 0"),
    ],
)
def test_what_needs_a_batch_at_the_end_of_an_epoch_is_named(tmp_path, old, new, line):
    """A restart from the checkpoint of an epoch's last step has no batch left in this epoch."""
    text = MODULE.replace(old, new, 1)
    assert text != MODULE
    if line is None:
        change(make_exact, tmp_path, text)
    else:
        assert any(line in text for text in refuse(make_exact, tmp_path / "train.py", text))
