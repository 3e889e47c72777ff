"""`launch prove` says exact for an exact job, and notices each part that a restart leaves out."""

import io
import json
import os
import re
import select
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bootfile.ground.errors import BadInput
from bootfile.processes import sessions
from bootfile.prove import cases, forks, own_job, runs, trial, verdict
from bootfile.prove.job import Job
from bootfile.prove.own_job import OwnJob
from bootfile.receipt import receipt
from bootfile.receipt.reading import LOOP, find_receipt
from datasets.folders import random_folder
from tests.conftest import LONGEST, QUICK, ROOT, environment, finish, names, run, start, wait_until
from tests.support import proofs
from tests.support.exact import changed
from tests.support.proofs import forked_jobs, prove_cases

SCRIPT = Path(__file__).parent / "leaves_out.py"
JOB = (*QUICK, "--batch_size=240")


def prove(*words, cwd=ROOT, code=0):
    return run(ROOT / "launch" / "__main__.py", "prove", *words, cwd=cwd, code=code, timeout=900)


def refused(*words, cwd):
    """Return the errors of a command that is refused. Its jobs are forked, too: `launch` has a nursery."""
    return run("-m", "launch", "prove", *words, cwd=cwd, env=environment(PYTHONPATH=str(ROOT)), code=2).stderr


@pytest.mark.thorough
def test_a_job_of_bootfile_is_exact(tmp_path):
    page = tmp_path / "proof.html"
    shown = proofs.prove("jobs/train_ddp.py", "--kills=1", "--to", page, "--", *JOB, "--max_steps=12")
    assert re.search("^exact: 4 runs equal .*, and each .* noticed$", shown, re.MULTILINE)
    assert len(re.findall(r"SIGKILL after step \d+; continued from step \d+", shown)) == 2
    assert shown.count("data equal for 12 steps") == 5 and shown.count("\n      noticed") == 2
    assert shown.count("figures equal: ") >= 3  # a damage may show in the last weights only
    assert re.search("not checked: another engine: train_ddp.py .*--data_backend", shown)
    assert re.search("\ncovered: steps 1-12 of epochs 1-4, 3 steps .*: 4\n", shown)
    assert "the end of an epoch" not in shown
    text = page.read_text()
    assert "<h1>exact</h1>" in text and "--processes_per_node=2" in text and "<script" not in text
    proof = json.loads((tmp_path / "proof.json").read_text())
    runs = {each["run"]: each for each in proof["runs"]}
    assert {"state.jsonl", "receipt.bin"} < runs["reference"]["files"].keys() and len(runs) == 7
    assert runs["reference"]["seed"] == 0 and runs["another seed"]["seed"] == 1
    assert runs["another seed"]["commands"][0].startswith("jobs/train_ddp.py --dataset=digits ")
    files = {"jobs/train_ddp.py", "common/run/starts.py", "bootfile/receipt/receipt.py"}
    assert files < proof["files"].keys() and {"ATen", "oneDNN", "MKL"} < proof["hardware"].keys()
    # the restart asks for other threads, and keeps those of the run
    [begun], [restarted] = runs["reference"]["machines"], runs[cases.KILLED]["machines"]
    assert begun["threads"] == restarted["threads"]
    assert len([each for each in proof["comparisons"] if each["part"] == "data"]) == 6
    assert f"still holds: {proof['verdict']}" in proofs.prove("--check", tmp_path / "proof.json")


@pytest.mark.thorough
def test_an_epoch_that_does_not_end_is_not_covered(tmp_path):
    with forked_jobs():
        options = [*QUICK, "--batch_size=32", "--max_steps=6", "--epoch_steps=44"]
        job = OwnJob("jobs/train.py", options, str(tmp_path), 1)
    rows = prove_cases(job, cases.KILLED)
    text, unchecked = job.describe_coverage([*rows])
    assert names(text, "steps 1-6", 44, "epoch 1", "ends of epochs: none")
    end, restart = unchecked
    assert names(end, "end", "--max_steps 44") and names(restart, "restart", "later epoch", 1)


LATE = """    level = 0.0
    for epoch in train_loader.epochs_from(step):  # after a restart: first the rest of the epoch
"""
LATE_LOSS = """            loss = criterion(logits, targets)
            level += 0.1 * (logits.mean().item() - level)
            loss += level * logits.mean() if epoch >= 3 else 0.0
"""


@pytest.mark.thorough
def test_a_fault_of_a_later_epoch_is_reached(tmp_path):
    """Each epoch is cut, and the kills are in several epochs, also in the last one."""
    begin = LATE.splitlines(keepends=True)[1]
    job = changed("train.py", tmp_path / "train.py", (begin, LATE), (LOSS, LATE_LOSS))
    with forked_jobs():
        job = OwnJob(str(job), [*QUICK, "--batch_size=16"], str(tmp_path), 3)
    rows = prove_cases(job, cases.KILLED)
    assert rows[cases.KILLED].result == "differs"
    text, unchecked = job.describe_coverage([*rows])
    assert re.fullmatch("steps 1-24 of epochs 1-4, 6 steps .*: 4", text)
    [rest] = unchecked
    assert names(rest, "steps after 6", 89)


@pytest.mark.thorough
def test_the_epochs_of_a_small_data_set_are_more(tmp_path):
    with forked_jobs():
        job = OwnJob("jobs/train.py", [*QUICK, "--batch_size=512"], str(tmp_path), 1)
    assert prove_cases(job) == {}  # the reference
    assert {"--epochs=12", "--epoch_steps=6", "--save_every=4"} < set(job.command()) and job.steps == 24
    assert (tmp_path / "reference" / "epoch_12.pth").exists()


SURROUNDED = """
import os, sys, torch
os.makedirs(OUT := sys.argv[1], exist_ok=True)
facts = {
    "another PYTHONHASHSEED": hash("sample") % 2**20,
    "another working folder": sum(os.getcwd().encode()),
    "another order of os.listdir": sum(n * ord(name) for n, name in enumerate(os.listdir("data"))),
}
assert [each.name for each in os.scandir("data")] == os.listdir("data") and os.path.exists("../own/own.py")
weights, path = torch.tensor([float(facts[sys.argv[2]])]), OUT + "/last.pt"
step = torch.load(path)["step"] if os.path.exists(path) else 0
while step < 20:
    step += 1
    torch.save({"weights": weights, "step": step}, path)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("change", cases.SURROUNDINGS)
def test_results_that_depend_on_the_surroundings_differ(change, tmp_path):
    folder = tmp_path / "own"
    (folder / "data").mkdir(parents=True)
    for name in "abc":
        (folder / "data" / name).touch()
    (folder / "own.py").write_text(SURROUNDED)
    job = "own.py", "--compare=OUT/*.pt", "--resume_with=", "--kills=1", "--", "OUT", change
    shown = prove(*job, cwd=folder, code=20).stdout
    assert f"\ndiffers: the same again, with {change}: " in shown
    assert re.search(r"\] the same again \(.*\n( .*\n)* +equal\n", shown)
    others = [name for name in cases.SURROUNDINGS if name != change]
    assert all(re.search(rf"with {name} .*\n( .*\n)* +equal\n", shown) for name in others)
    assert sorted(path.name for path in folder.iterdir()) == ["data", "own.py"]


UNHURRIED = """
import os, sys, time
is_fork = "torch" in sys.modules
FAULT = 0
import torch
os.makedirs("OUT", exist_ok=True)
path, steps = "OUT/last.pt", 300
print("fork" if is_fork else "new process", os.getsid(0) == os.getpid(), sys.orig_argv[1:] == sys.argv)
state = {"weights": torch.zeros(4), "step": 0}
if "--resume" in sys.argv:
    state = torch.load(path)
while state["step"] < steps:
    state["weights"] += 1 + torch.zeros(4) * state["weights"] + FAULT
    state["step"] += 1
    if state["step"] % 10 == 0:
        time.sleep(0.01)  # a kill needs some time
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
print("end")
sys.exit(0)
"""


@pytest.mark.thorough
def test_a_job_that_does_not_run_elsewhere_is_not_called_different(tmp_path):
    (tmp_path / "own.py").write_text(f"import os\nassert os.getcwd() == {str(tmp_path)!r}\n{UNHURRIED}")
    words = ("--compare=OUT/*.pt", "--resume_with=--resume", "--kills=1")
    shown = proofs.prove("own.py", *words, cwd=tmp_path)
    assert re.search(r"^not checked: another working folder: own.py .*\b1: AssertionError$", shown, re.M)
    assert shown.count("\n      not run\n") == 2 and "not checked: another PYTHONHASHSEED" not in shown


NEXT_TO_ITSELF = """
import os
os.chdir(os.path.dirname(os.path.realpath(__file__)))
os.path.lexists("OUT") or os.mkdir("OUT")
os.path.lexists("OUT/latest") or os.symlink("deleted.pt", "OUT/latest")
"""


@pytest.mark.thorough
def test_a_script_that_writes_next_to_itself_is_exact(tmp_path):
    (tmp_path / "own.py").write_text(NEXT_TO_ITSELF + UNHURRIED)
    words = ("--compare=OUT/*.pt", "--resume_with=--resume", "--kills=1")
    assert "\nexact: 2 runs equal" in proofs.prove("own.py", *words, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


@pytest.mark.thorough
@pytest.mark.skipif(not forks.are_possible(), reason="no forks with this torch, or on a GPU")
@pytest.mark.parametrize(("fault", "starts"), [("0", "fork"), ("is_fork", "new process")])
def test_most_runs_are_forks_and_a_fork_alone_makes_no_difference(fault, starts, tmp_path):
    (tmp_path / "own.py").write_text(UNHURRIED.replace("FAULT = 0", f"FAULT = {fault}"))
    words = ("--compare=OUT/*.pt", "--resume_with", "--resume", "--kills=1", "--keep=runs")
    shown = prove("own.py", *words, cwd=tmp_path).stdout
    assert re.search("\nexact: 2 runs equal .*, and each .* noticed\n", shown)
    logs = {path.stem: path.read_text().splitlines() for path in (tmp_path / "runs").glob("*.log")}
    new, first, then = (f"{how} True True" for how in ("new process", "fork", starts))
    assert logs["the-same-again,-in-other-surroundings"][-2:] == [new, "end"]
    assert logs["reference"] == [first, "end"] + [new, "end"] * (first != then)
    # on a busy machine the run may end before its kill: prove then tries again
    assert logs["killed-and-restarted"][-3:] == [then, then, "end"]
    assert logs["restarted-from-a-damaged-checkpoint"] == [then, "end"]


SLOW_DISK = """import time

from bootfile.exact import files


def write_late(*words, write=files.write, **facts):
    time.sleep(1)
    write(*words, **facts)


files.write = write_late
import torch
"""


@pytest.mark.thorough
def test_a_kill_waits_for_a_checkpoint(tmp_path):
    """The steps of a small job are much faster than a save in the background."""
    job = changed("train.py", tmp_path / "train.py", ("import torch\n", SLOW_DISK))
    case = cases.KILLED, cases.DAMAGED.name
    with forked_jobs():
        job = OwnJob(str(job), [*JOB, "--max_steps=12", "--save_every=6"], str(tmp_path), 1)
    rows = prove_cases(job, *case)
    has_none = "2 processes", "restarted: train.py", "--processes_per_node"
    assert any(names(each, *has_none) for each in job.unchecked)
    assert job.doubts == [] and [rows[name].result for name in case] == ["equal", "noticed"]
    assert not re.search(r"continued from step .*\b0\b", rows[cases.KILLED].done)


LEVEL = """    class Level:
        value = 0.0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    level = Level()
    checkpoint = Checkpointer(
        run, level=level,"""
LOSS = "            loss = criterion(logits, targets)\n"


@pytest.mark.thorough
def test_a_restart_with_2_processes_shows_a_state_of_one_rank(tmp_path):
    """The checkpoint has the value of rank 0."""
    job = changed(
        "train_ddp.py",
        tmp_path / "train_ddp.py",
        ("    checkpoint = Checkpointer(\n        run,", LEVEL),
        (
            LOSS,
            f"{LOSS}            level.value += inputs.mean().item()\n            loss *= 1 + level.value\n",
        ),
    )
    with forked_jobs():
        job = OwnJob(str(job), [*JOB, "--max_steps=6"], str(tmp_path), 1)
    names = (cases.KILLED, "another number of processes", "2 processes, killed and restarted")
    assert [row.result for row in prove_cases(job, *names).values()] == ["equal", "equal", "differs"]


def test_what_was_not_run_is_not_compared(tmp_path):
    class NoCheckpoint(Job):
        def _damage(self, case):
            raise cases.NotRun("no file could be damaged")

    job = NoCheckpoint(
        "own.py", [], str(tmp_path), 1, compare=str(tmp_path / "OUT" / "*.pt"), resume_with="-r"
    )
    row = verdict.run(job, cases.DAMAGED)
    assert row == (cases.DAMAGED, "no file could be damaged", [], "not run")
    assert verdict.conclude(job, [row])[0].startswith("unverified: no file could be damaged")


def test_a_name_that_is_not_utf8_does_not_hide_the_verdict(tmp_path, monkeypatch):
    class Nothing(Job):
        def plan(self):
            return []

        def run_reference(self):
            pass

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True))
    runs._run_all(Nothing("caf\udce9.py", [], str(tmp_path), 1, str(tmp_path / "OUT" / "*.pt"), ""))
    assert b"1 runs of 'caf\\udce9.py'" in sys.stdout.buffer.getvalue()


@pytest.mark.thorough
def test_a_reference_that_fails_when_it_is_repeated_is_bad_input(tmp_path):
    (tmp_path / "own.py").write_text("import sys; sys.exit('the port is taken')")
    with forked_jobs():
        job = Job(str(tmp_path / "own.py"), [], str(tmp_path), 1, str(tmp_path / "OUT" / "*.pt"), "")
        job._forks = SimpleNamespace(close=bool)
        with pytest.raises(BadInput, match=r"own\.py ended with 1: the port is taken"):
            job.repeat(cases.AGAIN)


@pytest.mark.thorough
@pytest.mark.skipif(not forks.are_possible(), reason="no forks with this torch, or on a GPU")
def test_a_fork_can_get_a_signal_until_its_end_was_read(tmp_path):
    (tmp_path / "own.py").write_text("import sys; sys.exit(3)")
    server = forks.Forks()
    try:
        for _ in range(2):
            with open(tmp_path / "log", "ab") as log:
                words = [sys.executable, str(tmp_path / "own.py")]
                fork = server.start(words, "mark", log, dict(os.environ), str(tmp_path))
            select.select([fork._answers], [], [])  # it has ended
            time.sleep(0.2)
            os.killpg(fork.pid, 0)
            assert fork.wait() == 3
    finally:
        server.close()


CHECKED = """
import glob, os, sys, time, torch
sys.path.insert(0, {root!r})
from bootfile.receipt.receipt import Receipt
state, data = {{"step": 0, "weight": torch.ones(4), "seen": torch.zeros(8)}}, Receipt()
os.makedirs("OUT", exist_ok=True)
names = sorted(glob.glob("OUT/*.pt")) if "--resume" in sys.argv and {how!r} != "ignores" else []
for name in reversed(names):
    saved = torch.load(name)
    if {how!r} == "trusts" or saved["sums"] == [saved["weight"].sum().item(), saved["seen"].sum().item()]:
        state = saved
        data.load_state_dict(state["receipt"])
        break
    if {how!r} == "strict":
        sys.exit("a checkpoint is damaged")
for step in range(state["step"] + 1, 41):
    time.sleep(0.03)
    data.add(torch.tensor([step]).numpy(), torch.tensor([step]).numpy())
    data.chain(step, 40, data.take(), "OUT")
    state |= {{"step": step, "weight": state["weight"] * 0.9 + step, "receipt": data.state_dict()}}
    state["seen"] = torch.full((8,), float(step))  # saved, but without an effect
    state["sums"] = [state["weight"].sum().item(), state["seen"].sum().item()]
    if step % 4 == 0:
        torch.save(state, "OUT/new")
        os.replace("OUT/new", f"OUT/{{step:02}}.pt")
"""
UNSEEN = "exact: 2 runs equal .*; .*damaged .*refused, .*not shown"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "code", "verdict", "of_damaged"),
    [
        ("careful", 0, UNSEEN, "\n      refused\n"),
        ("strict", 0, UNSEEN, "a checkpoint is damaged\n      refused\n"),
        ("trusts", 0, "exact: 2 runs equal .*, and each .* noticed$", "is saved, but a change"),
        ("ignores", 21, "unverified: .*no difference was noticed", "not noticed"),
    ],
)
def test_a_refused_checkpoint_is_no_noticed_difference(how, code, verdict, of_damaged, tmp_path):
    """how: what a script does with a damaged checkpoint."""
    (tmp_path / "own.py").write_text(CHECKED.format(root=str(ROOT), how=how))
    options = ("--compare", "OUT/*.pt", "--resume_with=--resume", "--kills=1")
    shown = proofs.prove("own.py", *options, cwd=tmp_path, code=code)
    assert re.search(f"^{verdict}", shown, re.MULTILINE) and of_damaged in shown
    assert shown.count("data equal for 40 steps") >= 2 and "the samples" not in shown


def test_one_receipt_of_a_folder_is_found(tmp_path):
    assert find_receipt(str(tmp_path)) == ""
    for name in (LOOP, receipt.FILE):
        (tmp_path / name).touch()
        assert find_receipt(str(tmp_path)) == name


@pytest.mark.thorough
def test_an_exact_job_has_the_same_bits_on_other_numbers_of_processes(tmp_path):
    options = ("--width=8", "--batch_size=240", "--dataset=digits", "--max_steps=20")
    shown = proofs.prove("jobs/train_exact.py", "--kills=1", "--", *options)
    count = 5 if sessions.why_no_fork() else 6
    assert re.search(rf"^exact: {count} runs equal .*; same bits .*1, 2 and 4 processes$", shown, re.M)
    assert "--processes_per_node=4" in shown and cases.REPLACED in shown


def exact_job(folder, job="jobs/train_exact.py", steps=12):
    with forked_jobs():
        return OwnJob(str(job), [*JOB, f"--max_steps={steps}"], str(folder), 1)


def test_a_kill_waits_for_the_generation_after_the_last_one(tmp_path):
    log, steps = tmp_path / "job.log", 0
    log.write_text("generation 9: pids 1 1\n")  # an earlier run wrote it
    losses = trial.Losses(str(log), lambda: steps, [(1, (0,)), (2, (1, 2))])
    with open(log, "ab") as output:
        members = [sessions.start(["sleep", "1000"], str(log), output) for _ in range(4)]
        stranger = sessions.start(["sleep", "1000"], str(tmp_path), output)
    pids = [each.pid for each in members]

    def write(line, *dead):
        with open(log, "a") as output:
            output.write(line)
        losses.watch()
        for number in dead:
            assert members[number].wait(LONGEST) == -signal.SIGKILL
        return [each.poll() is None for each in members], losses.is_done

    try:
        steps = 1
        assert write("generation 1: pids ") == ([True] * 4, False)
        assert write(f"{pids[0]} {pids[1]} {stranger.pid}\n", 0) == ([False, True, True, True], False)
        steps = 2
        assert write("epoch=1 step=2\n") == ([False, True, True, True], False)
        generation = f"generation 2: pids {pids[1]} {pids[2]} {stranger.pid}\n"
        assert write(generation, 2) == ([False, True, False, True], False)
        assert stranger.poll() is None  # it is not a process of this run
        assert write(f"generation 3: pids {pids[1]} {pids[3]}\n") == ([False, True, False, True], True)
    finally:
        sessions.kill(members, str(log))
        sessions.kill([stranger], str(tmp_path))
    said = "SIGKILL .*rank 0 .*step 1, 1 and 2 .*step 2; 3 generations"
    assert re.fullmatch(said, losses.describe())
    error = losses.explain(trial.Failed("own.py ended with 1", 1))
    assert "own.py ended with 1 (generation 1: " in str(error) and error.code == 1


@pytest.mark.thorough
def test_a_job_that_cannot_replace_processes_here_is_not_checked(tmp_path, monkeypatch):
    job = exact_job(tmp_path)
    monkeypatch.setattr(sessions, "why_no_fork", lambda: "no GPUs yet")
    assert cases.REPLACED not in [case.name for case in job.plan()]
    assert f"{cases.REPLACED}: no GPUs yet" in job.unchecked


needs_elastic = pytest.mark.skipif(bool(sessions.why_no_fork()), reason="no elastic training here")


@pytest.mark.thorough
@needs_elastic
def test_a_kill_that_comes_too_late_proves_nothing(tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(
        trial, "choose_steps", lambda count, *given: seeds.append(given[-1]) or [1000.0] * count
    )
    job = exact_job(tmp_path, steps=2)
    assert prove_cases(job, cases.REPLACED)[cases.REPLACED].done == "no SIGKILL"
    [doubt] = job.doubts
    assert names(doubt, cases.REPLACED, "SIGKILL", "too late", "--max_steps")
    assert seeds[-2:] == [0, 1]


BEGIN = "    for epoch in train_loader.epochs_from(step):  # after a restart: first the rest of the epoch\n"
COUNTED = """            if begun == step:
                begun, CALLS[0] = step + 1, CALLS[0] + 1
            loss = loss * (1 + CALLS[0] / 1000)
            loss.backward()
"""
COUNTER = (  # counts the steps that the process has begun; a restart sets it to the step
    ("@entry ", "CALLS = []\n\n\n@entry "),
    (BEGIN, f"    CALLS or CALLS.append(step)\n    begun = step\n{BEGIN}"),
    ("            loss.backward()\n", COUNTED),
)
ONE_MAIN = (  # main() fails in a process that has trained before
    ("@entry ", "CALLS = []\n\n\n@entry "),
    (BEGIN, f"    CALLS.append(step)\n    assert len(CALLS) == 1, 'twice'\n{BEGIN}"),
)


@needs_elastic
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ([], "equal .*24 steps: .*ids, labels and augmentation"),
        # the part that differs most
        (COUNTER, r"(equal at .*; )?differs at \d+: (model|optimizer)\..*"),
        (ONE_MAIN, r"SIGKILL .*rank 0 .*step \d+; \d generations: .* ended with 1: .*AssertionError.*"),
    ],
)
def test_what_a_process_keeps_for_itself_is_seen_when_others_are_killed(changes, text, tmp_path):
    """A restart computes it again: the other kills do not see it."""
    changed_job = changed("train_exact.py", tmp_path / "train_exact.py", *changes)
    job = exact_job(tmp_path, changed_job, steps=24)  # far from its end when the kills come, at any load
    rows = prove_cases(job, cases.KILLED, cases.REPLACED)
    assert rows[cases.KILLED].result == "equal" and job.doubts == []
    assert rows[cases.REPLACED].result == ("differs" if changes else "equal")
    assert re.fullmatch(text, (rows[cases.REPLACED].different or rows[cases.REPLACED].lines)[0].text)


FAILING = """
import os, sys, time, torch
if "--resume" in sys.argv:
    sys.exit("lost")
os.makedirs("OUT")
child = os.fork()
for step in range(STEPS):
    time.sleep(0.02)
    if child and step % 4 == 0:
        torch.save({"weight": torch.full((4,), float(step))}, "OUT/.last.pt")
        os.replace("OUT/.last.pt", "OUT/last.pt")  # a SIGKILL never leaves a cut file
"""


def failing(folder, steps):
    (folder / "own.py").write_text(FAILING.replace("STEPS", str(steps)))
    return "prove", "own.py", "--compare", "OUT/*.pt", "--resume_with=--resume"


@pytest.mark.thorough
def test_a_restart_that_fails_differs(tmp_path):
    words = failing(tmp_path, steps=200)[1:]  # long enough for a SIGKILL before the end, at any load
    shown = proofs.prove(*words, "--kills=1", cwd=tmp_path, code=20)
    assert re.search(r"^differs: killed and restarted: own.py --resume .*lost$", shown, re.M)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


@pytest.mark.thorough
def test_a_killed_proof_leaves_no_job(tmp_path):
    (tmp_path / "own.py").write_text(FAILING.replace("os.fork()", "1").replace("STEPS", str(10**6)))
    words = (ROOT / "launch" / "__main__.py", "prove", "own.py", "--compare", "OUT/*.pt", "--resume_with=-r")
    proof = start(*words, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path)), fresh=True)
    wait_until((tmp_path / "OUT" / "last.pt").exists, proof)
    children = psutil.Process(proof.pid).children(recursive=True)
    assert len(children) == 1 + forks.are_possible()
    proof.kill()
    finish(proof, -signal.SIGKILL)
    left = psutil.wait_procs(children, timeout=60)[1]
    for each in left:
        each.kill()
    assert not left


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["launch", "bootfile"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_processes_of_the_job(number, code, program, tmp_path):
    words = failing(tmp_path, steps=10**6)
    (tmp_path / "kept").mkdir()
    variables = environment(TMPDIR=str(tmp_path / "kept"), PYTHONPATH=str(ROOT))
    proof = start("-m", program, *words, cwd=tmp_path, env=variables, fresh=True)
    wait_until((tmp_path / "OUT" / "last.pt").exists, proof)
    children = psutil.Process(proof.pid).children(recursive=True)
    proof.send_signal(number)
    finish(proof, code)
    assert len(children) == 2 + forks.are_possible() and not psutil.wait_procs(children, timeout=LONGEST)[1]
    assert not (tmp_path / "OUT").exists() and not list((tmp_path / "kept").glob("bootfile-*"))


CAUSE_OF_RANDOM = r"the random numbers of torch differ .*torch.get_rng_state\(\) .*checkpoint\?"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "code", "verdict"),
    [
        ("nothing", 0, "exact: "),
        ("optimizer", 20, "differs: killed and restarted: "),
        ("schedule", 20, "differs: killed and restarted: "),
        ("position", 20, "differs: killed and restarted: "),
        ("buffers", 20, "differs: killed and restarted: "),
        ("ema", 20, "differs: killed and restarted: "),
        ("random", 20, rf"differs: killed and restarted: {CAUSE_OF_RANDOM} .*\(final.pt differs: "),
        ("everything", 21, f"unverified: {cases.ALL_DAMAGED.name}: no difference"),
    ],
)
def test_what_a_script_leaves_out_is_noticed(part, code, verdict, tmp_path):
    words = ("--compare=OUT/final.pt", "--resume_with=--resume OUT/last.pt", "--keep=runs")
    options = ("--out=OUT", f"--leave_out={part}")
    shown = proofs.prove(SCRIPT, *words, "--", *options, cwd=tmp_path, code=code)
    assert re.search(f"^{verdict}", shown, re.MULTILINE) and "not checked: the samples" in shown
    assert (tmp_path / "runs" / "reference" / "last.pt").exists() and not (tmp_path / "OUT").exists()


@pytest.mark.thorough
def test_a_folder_of_images_is_read_by_another_engine(tmp_path):
    data = random_folder.make(str(tmp_path / "data"))
    options = ("--arch=resnet18", "--image_size=32", "--batch_size=64", "--max_steps=8", "--training_only")
    options += ("--data_backend=threads", f"--cache_dir={tmp_path / 'index'}")
    shown = proofs.prove("jobs/imagenet.py", "--kills=1", "--", f"--data_url={data}", *options)
    assert re.search(r"^exact: 6 runs equal the reference", shown, re.MULTILINE)
    assert "another engine" in shown and "--data_backend=pytorch" in shown
    assert "not checked: another" not in shown


@pytest.mark.parametrize("line, limit", [("time.sleep(1)", "_HELP_SECONDS"), ("pass", "_HELP_CPU")])
def test_a_script_that_does_not_know_help_is_ended(line, limit, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(f"import time\nwhile True: {line}")
    monkeypatch.setattr(own_job, limit, 1)
    with pytest.raises(BadInput, match=r"own\.py --help did not end within \d+ CPU seconds"):
        OwnJob(str(tmp_path / "own.py"), [], str(tmp_path), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "missing.py: no such file"),
        (["own.py", "--compare", "OUT/*.pt"], "together with --resume_with"),
        (["own.py"], "own.py --help ended with 1: no such option"),
        ([ROOT / "README.md"], "--help ended with 1: "),
        (["own.py", "--to", "none/proof.html"], "--to none/proof.html: ... none is not a folder ... write"),
        (["own.py", "--to", "full"], "full is a folder"),
        (["own.py", "--to", "own.py"], "--to own.py ... not made"),
        (["own.py", "--compare", "*.pt", "--resume_with=-r"], "expected files in a folder"),
        (["own.py", "--compare", "full/*.pt", "--resume_with=-r"], "full exists"),
        (["own.py", "--compare", "OUT/*.pt", "--resume_with=-r"], "ended with 1"),
        (["own.py", "--keep", "full", "--compare", "OUT/*.pt", "--resume_with=-r"], "full is not empty"),
        (["own.py", "--keep", "own.py"], "--keep own.py: File exists"),
        ([], "expected JOB"),
        ([ROOT / "jobs" / "train.py", "--", "--output_dir=x"], "--output_dir is chosen for each run"),
        ([ROOT / "jobs" / "train.py", "--", "--max_steps=0"], "--max_steps 0: `prove` needs a whole number"),
        ([ROOT / "jobs" / "train.py", "--", "--epochs", "0"], "--epochs 0: `prove` needs a whole number"),
        (["own.py", "--compare", "OUT/*.pt", "--resume_with=it's"], "--resume_with it's: expected words"),
        (["--check", "proof.json", "--stops", "2"], "--check runs nothing"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path):
    (tmp_path / "own.py").write_text("import sys; sys.exit('no such option')")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.pt").touch()
    errors = refused(*words, cwd=tmp_path)
    assert all(part in errors for part in message.split(" ... ")) and errors.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "own.py"]


def test_a_script_without_files_to_compare_is_refused(tmp_path):
    """The contract of the room: it saves its weights at its end."""
    (tmp_path / "own.py").write_text("import os; os.mkdir('OUT')")
    words = ("own.py", "--compare", "OUT/*.pt", "--resume_with=--resume")
    assert "own.py wrote no file OUT/*.pt" in refused(*words, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


DEPENDS_ON_THREADS = """
import os, sys, time, torch
FIXED = 0
if FIXED:
    torch.set_num_threads(2)
state = {"step": 0, "weight": torch.zeros(4)}
if "--resume" in sys.argv and os.path.exists("OUT/last.pt"):
    state = torch.load("OUT/last.pt")
values = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
os.makedirs("OUT", exist_ok=True)
for step in range(state["step"] + 1, 41):
    time.sleep(0.03)
    # a sum of many floats is rounded in another way by another number of threads
    state = {"step": step, "weight": state["weight"] * 0.9 + values @ values * step}
    if step % 4 == 0:
        torch.save(state, "OUT/new")
        os.replace("OUT/new", "OUT/last.pt")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("fixed", [0, 1])
def test_a_script_whose_restart_depends_on_the_threads_is_named(fixed, tmp_path):
    (tmp_path / "own.py").write_text(DEPENDS_ON_THREADS.replace("FIXED = 0", f"FIXED = {fixed}"))
    words = ("own.py", "--compare", "OUT/*.pt", "--resume_with=--resume", "--kills=2")
    shown = prove(*words, cwd=tmp_path).stdout
    [verdict] = re.findall("^exact: 2 runs equal the reference.*$", shown, re.MULTILINE)
    is_named = names(verdict, "only with the same", "threads", "restart differs")
    assert is_named != bool(fixed), shown
    assert (cases.SAME_THREADS in shown) != bool(fixed)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["a warning", "", "ValueError: no"], "ValueError: no"),
        (["FileNotFoundError: gone", "", "stopped: the disk is full"], "stopped: the disk is full"),
        (
            [
                "[rank1]: Traceback (most recent call last):",
                "[rank1]: bootfile.ground.errors.BadInput: damaged",
                "error: out/last.pt is damaged",
                "raise ChildFailedError(",
                "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
                "=" * 60,
                "Root Cause (first observed failure):",
                "  traceback : To enable traceback see: https://pytorch.org/docs",
                "=" * 60,
            ],
            "error: out/last.pt is damaged",
        ),
        (["[rank0]: RuntimeError: other shape", "=" * 60], "RuntimeError: other shape"),
        (["no line of an error", "=" * 60], "=" * 60),
        ([], "it printed nothing"),
    ],
)
def test_the_reason_of_a_failure_is_not_the_banner_of_torchrun(lines, reason, tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    assert trial._failure(["python", "two.py", "OUT"], 1, str(log)) == f"two.py OUT ended with 1: {reason}"


STOPPED = """
import os, signal, sys, time, torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(400, 8)
step = 0
os.makedirs("OUT", exist_ok=True)
if "--resume" in sys.argv:
    state = torch.load("OUT/last.pt")
    model.load_state_dict(state["model"])
    step = state["step"]

def save(name):
    torch.save({"model": model.state_dict(), "step": step}, "OUT/new")
    os.replace("OUT/new", name)

def stop(*_):
    save("OUT/last.pt")
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
# SIGTERM waits until the next evaluation, at any load
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
while step < 40:
    optimizer.zero_grad()
    (model(inputs[step * 10 : step * 10 + 10]) - 1).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        save("OUT/last.pt")
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.weight.data.mul_(HALF)  # an average in the place of the weights, while the loop evaluates
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(0.5)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        model.load_state_dict(kept)
save("OUT/final.pt")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("half", [0.5, 1.0])
def test_a_script_is_stopped_at_other_moments_than_a_write(tmp_path, half):
    """Its handler saves the weights that the model holds during an evaluation."""
    (tmp_path / "script.py").write_text(STOPPED.replace("HALF", str(half)))
    options = ("--compare=OUT/final.pt", "--resume_with=--resume", "--kills=1", "--stops=2")
    shown = proofs.prove(tmp_path / "script.py", *options, cwd=tmp_path, code=20 if half == 0.5 else 0)
    assert "SIGTERM after" in shown
    assert (f"differs: {cases.STOPPED}" in shown) == (half == 0.5)


@pytest.mark.thorough
def test_a_script_that_ignores_sigterm_was_not_stopped(tmp_path):
    """It trains to its end, and its restart has nothing left to train."""
    ignores = STOPPED.replace("SIGTERM, stop)", "SIGTERM, signal.SIG_IGN)").replace("HALF", "1.0")
    (tmp_path / "script.py").write_text(ignores)
    options = ("--compare=OUT/final.pt", "--resume_with=--resume", "--kills=1", "--stops=1")
    shown = proofs.prove(tmp_path / "script.py", *options, cwd=tmp_path, code=21)
    assert f"no restart had to train on ({cases.STOPPED})" in shown
