"""`python -m launch simulate` runs the real job and small scripts, with faults."""

import os
import re
import signal
from pathlib import Path

import pytest

from bootfile.ground.errors import BadInput
from bootfile.ground.exit_codes import explain_exit_code
from launch import profiles
from launch.simulate import cli, faults
from tests.conftest import LONGEST, QUICK, environment, finish, names, read_until, start
from tests.support.simulated import fired, rows, simulate

JOB = ("jobs/train_ddp.py", "--", *QUICK, "--max_steps=3", "--batch_size=32")

STEPS = """
import time
for step in range(1, 101):
    print(f"epoch=1 step={step} loss=1", flush=True)
    time.sleep(0.02)
"""
# node 1 alone, or each node, prints steps until a fault ends it
ENDLESS_1 = STEPS.replace("range(1, 101)", "range(1, 101 + 10**6 * (os.environ['VC_TASK_INDEX'] == '1'))")
ENDLESS_1 = f"import os{ENDLESS_1}"
ENDLESS = STEPS.replace("range(1, 101)", "range(1, 10**6)")
LONGEST_STEP = """
import time
longest = 0.0
last = time.monotonic()
for step in range(1, 10**6):
    print(f"epoch=1 step={step} loss=1", flush=True)
    time.sleep(0.02)
    longest = max(longest, time.monotonic() - last)
    last = time.monotonic()
    if step >= 100 and longest > 0.9: break  # after the fault
print("longest", longest)
"""
# Two nodes that wait for each other before the first step, as those of a job do: a fault that waits for a
# step of any node does not hit a node that has not begun. Each prints its longest time without a step.
STEPS_TOGETHER = """
import os, signal, time
continued = []  # after a pause, which node 1 waits for
signal.signal(signal.SIGCONT, lambda *_: continued.append(True))
last = time.monotonic()
open(os.path.join(os.environ["MEETING"], os.environ["VC_TASK_INDEX"]), "w").close()
while True:
    now = time.monotonic()
    if len(os.listdir(os.environ["MEETING"])) == 2:
        break
    last = now  # no step, and so no fault, was before it
    time.sleep(0.01)
longest = 0.0
for step in range(1, 10**6):
    print(f"epoch=1 step={step} loss=1", flush=True)
    time.sleep(0.02)
    longest = max(longest, time.monotonic() - last)
    last = time.monotonic()
    if step >= 100 and (continued or os.environ["VC_TASK_INDEX"] == "0"): break
print("longest", longest, "after a pause" * bool(continued))
"""
SAY_ALL = """
import glob, os, sys
print("arguments", *sys.argv[1:])
print("environment", *sorted(os.environ))
for argument in sys.argv[1:]:
    name, _, place = argument.partition("=")
    if name == "--data_url":
        paths = glob.glob(os.path.join(place, "*") if os.path.isdir(place) else place)
        print("data", *map(os.path.basename, paths))
print("path", os.environ.get("PYTHONPATH"), os.getcwd())
"""
LEAVE_TRACES = """
import os, sys, time
mount, node = os.environ["MA_MOUNT_PATH"], os.environ["VC_TASK_INDEX"]
counts = os.environ["MA_SCHEDULE_CNT"] + os.environ["MA_PROC_START_CNT"]
folders = [".", os.path.join(mount, "cache"), os.path.join(mount, "outputs", "train_url_0")]
found = [",".join(sorted({"trace0", "trace1"} & {*os.listdir(folder)})) for folder in folders]
print(f"counts={counts} code={found[0]} cache={found[1]} outputs={found[2]}", flush=True)
for folder in folders:
    open(os.path.join(folder, "trace" + node), "w").close()
if counts == "11":
    open(os.path.join(os.environ["MEETING"], node), "w").close()
    while len(os.listdir(os.environ["MEETING"])) < 2:
        time.sleep(0.01)
    for step in range(1, 31):
        print(f"epoch=1 step={step} loss=1", flush=True)
        time.sleep(0.05)
    if node in os.environ["FAILS"]:
        sys.exit(7)
    time.sleep(1000)  # until the fault ends it
"""
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
command = [sys.executable, "-c", "import time; time.sleep(600)", __file__]
child = subprocess.Popen(command, start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script into a new folder and returns its path."""

    def write(code: str) -> Path:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "job.py").write_text(code)
        return tmp_path / "mine" / "job.py"

    return write


def test_modelarts(tmp_path):
    kept = tmp_path / "kept"
    output = simulate("--nodes=2", "--keep", kept, *JOB).stdout
    assert [(node, row.code, row.meaning) for node, row in rows(output).items()] == [
        ("0", 0, "done"), ("1", 0, "done"),
    ]  # fmt: skip
    for node in range(2):
        assert f"[node {node}] ignored arguments: --num_gpus\n" in output
        topology = "topology source=modelarts-arguments level=node nodes=2 processes_per_node=1"
        assert f"[node {node}] {topology} node_rank={node}" in output
        folder = kept / f"node-{node}"
        assert sorted(os.listdir(folder)) == ["cache", "inputs", "logs", "outputs", "user-job-dir"]
        assert sorted(os.listdir(folder / "user-job-dir")) == [Path.cwd().name]
        code = folder / "user-job-dir" / Path.cwd().name
        assert sorted(os.listdir(code)) == ["LICENSE", "bootfile", "common", "datasets", "jobs"]
        assert os.listdir(folder / "inputs") == ["data_url_0"]
        log = (folder / "logs" / f"node_{node}.log").read_text()
        prefix = f"[node {node}] "
        printed = [line for line in output.splitlines() if line.startswith(prefix)]
        assert log.splitlines() == [line.removeprefix(prefix) for line in printed] and len(printed) > 2
    assert (kept / "node-0/outputs/train_url_0/epoch_1.pth").is_file()
    assert os.listdir(kept / "node-1/outputs/train_url_0") == [], "only rank 0 writes"


@pytest.mark.thorough
def test_a_new_container_without_the_mount_of_the_results():
    """Its folder of results is one of the container, so the counters of the platform are the only sign."""
    missing = "/proc/self/cwd/results"  # a folder in the working directory of each node
    job = ("jobs/train.py", "--", *QUICK, "--max_steps=6", "--batch_size=32", "--save_every=1")
    output = simulate("--fault=reschedule:step=3", *job, f"--train_url={missing}").stdout
    starts = re.findall(r"^\[node 0\] starts (.*)$", output, re.MULTILINE)
    assert starts == ["MA_SCHEDULE_CNT=1 MA_PROC_START_CNT=1", "MA_SCHEDULE_CNT=2 MA_PROC_START_CNT=1"]
    [warning] = re.findall(r"^\[node 0\] warning: (restart .*)$", output, re.MULTILINE)
    assert names(warning, "restart 1", "results", "no results", "not mounted here")
    assert "resumed from" not in output and rows(output)["0 run 2"].code == 0


@pytest.mark.thorough
def test_a_relative_folder_of_results_is_one_of_this_machine(tmp_path):
    """All nodes write to it, as to a mounted volume, and it is there after the simulation."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    folder = os.path.relpath(tmp_path / "runs")
    output = simulate("--nodes=2", str(script), "--", "--lr=1", "--train_url", folder).stdout
    assert output.count(f"'--train_url={tmp_path}/runs'") == 2


def test_a_killed_rank():
    """The other processes end by themselves, and the table gives their exit codes."""
    fault = "kill:rank=1,step=1"
    endless = ("--epochs=1000000", "--max_steps=1000000")  # otherwise it may end before the signal comes
    killed = simulate("--nodes=2", "--fault", fault, *JOB, f"--timeout={LONGEST}", *endless, code=None)
    assert f"fault {fault}: SIGKILL to rank 1 on node 1 time=" in killed.stdout
    table = rows(killed.stdout)
    assert fired(killed.stdout, fault) and table["1"].code == 137
    assert table["1"].meaning == "SIGKILL: killed, or out of memory"
    assert table["0"].code not in (0, 137) and killed.returncode in (table["0"].code, 137)


@pytest.mark.thorough
def test_the_jobs_exit_code_is_explained():
    result = simulate("jobs/train_ddp.py", "--", "--max_steps=0", code=2)
    assert "[node 0] error: argument --max_steps: '0' is not" in result.stdout
    assert rows(result.stdout)["0"].meaning.startswith("bad input: error: argument --max_steps: '0' is")


@pytest.mark.parametrize("code, beginning", [
    (0, "done"), (1, "an error in the program"), (124, "ended by a time limit"), (-9, "SIGKILL: killed"),
    (137, "SIGKILL: killed"), (247, "SIGKILL: killed"), (139, "SIGSEGV: segmentation"), (143, "SIGTERM"),
    (-7, "SIGBUS: bus error: usually /dev/shm"), (77, "an exit code of the program"),
    (200, "an exit code of the program"),
])  # fmt: skip
def test_exit_codes(code, beginning):
    assert explain_exit_code(code).startswith(beginning)


@pytest.mark.parametrize("arguments, message", [
    (["--fault=kil:rank=1"], "--fault kil:rank=1: unknown fault 'kil': expected one of kill, term"),
    (["--fault=kill:rnak=1,step=1"], "expected kill with the keys rank, step or every"),
    (["--fault=restart:step=3"], "--fault restart:step=3: expected restart with the keys node, step"),
    (["--fault=kill:rank=2,step=1"], "--fault kill:rank=2,step=1: rank=2 is not a whole number in 0..1"),
    (["--fault=kill:rank=0,step=0"], "step=0 is not a whole number in 1.."),
    (["--fault=kill:every=10"], "--fault kill:every=10: every=10 is not a number"),
    (["--fault=kill:every=2epochs"], "every=2epochs is not a number"),
    (["--fault=pause:node=0,step=2,for=3step"], "for=3step is not a number of seconds"),
    (["--fault=pause:node=2,step=2,for=1s"], "node=2 is not a whole number in 0..1"),
    (["--fault=pause:rank=1,every=3s,for=2s"], "is not a number of steps"),
    (["--fault=throttle:rank=1,step=5,to=0.3"], "is not a share in 1%..99%"),
    (["--fault=slow_data:node=0,rank=1,step=1,by=3s"], "expected slow_data with the keys"),
    (["--platform=plain"], "cannot start 2 nodes"),
    (["--nodes=99999999"], "--nodes 99999999 --processes 1: at most"),
    (["--platfrm=plain"], "did you mean --platform?"),
    (["--keep=README.md"], "README.md: File exists"),
    (["--dataset=digits"], "follow --"),
])  # fmt: skip
def test_bad_input_starts_nothing(arguments, message, capsys):
    with pytest.raises(BadInput) as error:
        cli.main(["--nodes=2", *arguments, *JOB])
    assert message in str(error.value) and not capsys.readouterr().out


@pytest.mark.parametrize("words", [["--data_url", "data"], ["--data_url=data/*.bin"]])
def test_what_a_node_gets(words, script, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sample.bin").write_text("0")
    outside = environment(
        RANK="5", SLURM_PROCID="1", MASTER_ADDR="h", MA_NUM_GPUS="8", MY_OWN="1", PYTHONPATH=str(Path.cwd())
    )
    kept = tmp_path / "kept"
    command = ("--platform=plain", "--processes=2", "--keep", kept, script(SAY_ALL), "--", *words, "--lr=1")
    result = simulate(*command, env=outside, cwd=tmp_path)
    names = re.search(r"\] environment (.*)", result.stdout)[1].split()
    assert {"MY_OWN", "PYTHONUNBUFFERED"} <= {*names}
    assert not {"RANK", "SLURM_PROCID", "MASTER_ADDR", "MA_NUM_GPUS", "PYTHONPATH"} & {*names}
    node = kept / "node-0"
    below = "/*.bin" if "--data_url=data/*.bin" in words else ""
    assert f"] arguments --lr=1 --data_url={node}/inputs/data_url_0{below}\n" in result.stdout
    assert "] data sample.bin\n" in result.stdout
    assert f"] path None {node}/user-job-dir/mine\n" in result.stdout
    assert os.listdir(node / "user-job-dir" / "mine") == ["job.py"]


@pytest.mark.parametrize("fault, again", [
    # of nodes 0 and 1 at their second start: both counts, and what code, cache and outputs contain
    ("restart:node=1,step=3", ["12 trace0 trace0 trace0", "12 trace1 trace1 trace1"]),
    ("reschedule:node=1,step=3", ["12 trace0 trace0 trace0", "21   trace0,trace1"]),
    ("reschedule:step=3", ["21   trace0,trace1", "21   trace0,trace1"]),
    ("evict:node=1,step=3", ["21   ", "21   "]),
])  # fmt: skip
def test_restarts(fault, again, script, tmp_path):
    meeting = tmp_path / "meeting"  # a fault waits for a step of any node, so both have left traces by then
    meeting.mkdir()
    command = ("--nodes=2", "--fault", fault, script(LEAVE_TRACES))
    fails = "" if fault == "reschedule:step=3" else "0"
    result = simulate(*command, env=environment(MEETING=str(meeting), FAILS=fails))
    for node, expected in enumerate(again):
        runs = re.findall(
            rf"\[node {node}\] counts=(\S*) code=(\S*) cache=(\S*) outputs=(\S*)", result.stdout
        )
        assert [" ".join(run) for run in runs] == ["11   ", expected]
    table = rows(result.stdout)
    code = 143 if fault.startswith("evict") else 137
    assert table["1 run 1"].code == code and table["1 run 1"].meaning == f"ended by fault {fault}"
    assert table["0 run 1"].code == (137 if fault == "reschedule:step=3" else 7), (
        "restarted after its failure"
    )
    assert table["0 run 2"].code == table["1 run 2"].code == 0


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(profiles, "_AFTER_GRACE", 0)
    ignore = "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    again = f"{str(tmp_path / 'mark')!r}"
    ends = f"if os.path.exists({again}): raise SystemExit\nopen({again}, 'w').close()\n"
    words = ["--fault=evict:node=0,step=2", str(script(ignore + ends + ENDLESS)), "--"]
    assert cli.main([*words, "--grace=0.5"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["0 run 1"].code == 137 and table["0 run 2"].code == 0
    with pytest.raises(BadInput, match="--grace never is not a number of seconds"):
        cli.main([*words, "--grace=never"])


def test_a_run_that_was_stuck_for_a_time_has_not_failed(script):
    told = "print('stuck for 60 s at step 4: rank 0 waits for data')\n"
    assert "own_script.md" not in simulate(script(told)).stdout


@pytest.mark.thorough
def test_a_node_that_has_ended_is_not_evicted(script):
    """It ends while the pod of the other one is replaced."""
    second = "evict:node=1,step=2"
    result = simulate("--nodes=2", "--fault=evict:node=0,step=2", "--fault", second, script(STEPS), code=3)
    assert f"fault {second} never fired" in result.stdout and rows(result.stdout)["1"].code == 0


def test_an_interrupt_ends_the_wait_for_a_pod(script):
    ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    words = ("--fault=evict:node=0,step=2", script(ignore + ENDLESS), "--", "--grace=100000")
    job = start("-m", "launch", "simulate", *words)
    read_until(job, "SIGTERM to nodes 0")
    job.send_signal(signal.SIGINT)
    assert "SIGINT to the simulation" in finish(job, 130).stdout


def test_a_stopped_node_is_ended_when_nothing_else_is_left(script):
    result = simulate("--nodes=2", "--fault=stop:rank=1,step=2", script(ENDLESS_1), code=137)
    table = rows(result.stdout)
    assert table["0"].code == 0 and table["0"].seconds >= 2, "it ended by itself"
    assert names(table["1"].meaning, "stopped by a fault", "killed after")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hang", "hold"])
def test_a_rank_hangs_for_a_time(kind, script):
    fault = f"{kind}:rank=0,step=3,for=1s"
    result = simulate("--fault", fault, script(LONGEST_STEP))
    assert f"fault {fault}: rank 0 continues" in result.stdout and fired(result.stdout, fault)
    assert float(re.search(r"longest ([\d.]+)", result.stdout)[1]) >= 0.9


@pytest.mark.parametrize("kind", ["hang", "hold"])
def test_a_rank_that_hangs_for_ever_is_ended_when_nothing_else_is_left(kind, script):
    result = simulate(f"--fault={kind}:rank=0,step=2", script(ENDLESS), code=137)
    assert names(rows(result.stdout)["0"].meaning, "stopped by a fault", "killed after")


@pytest.mark.parametrize("text, members", [
    ("kill:every=0.5s", {"seconds": 0.5}),
    ("kill:every=20step", {"steps": 20}),
    ("pause:node=1,step=5,for=20s", {"step": 5, "node": 1, "seconds": 20}),
    ("pause:rank=1,every=10step,for=2s", {"rank": 1, "seconds": 2, "steps": 10}),
    ("throttle:rank=1,step=5,to=30%", {"step": 5, "rank": 1, "share": 0.3}),
    ("slow_data:node=1,step=5,by=0.2s,for=20s", {"step": 5, "node": 1, "seconds": 20, "delay": 0.2}),
])  # fmt: skip
def test_a_fault_is_read(text, members):
    assert faults.parse(text, 2, 1) == faults.Fault(text, text.partition(":")[0], **members)


@pytest.mark.parametrize("every", ["0.2s", "20step"])
def test_a_random_rank_is_killed_again_and_again(every, script):
    """The job does not print its processes: the first kill ends node 0 or 1, and the second the other."""
    fault = f"kill:every={every}"
    result = simulate("--nodes=2", "--fault", fault, script(ENDLESS), code=137)
    assert [row.code for row in rows(result.stdout).values()] == [137, 137]
    kills = re.findall(rf"fault {fault}: SIGKILL to rank (\d) on node \d time=\S+ step=(\d+)", result.stdout)
    (first, first_step), (second, second_step) = kills
    assert {first, second} == {"0", "1"}
    if every == "20step":
        assert int(first_step) >= 20 and int(second_step) >= int(first_step) + 20
    else:
        assert fired(result.stdout, fault) >= 0.2


@pytest.mark.thorough
def test_a_paused_node_continues(script, tmp_path):
    fault = "pause:node=1,step=2,for=1.5s"
    meeting = tmp_path / "meeting"  # a fault waits for a step of any node, so both have begun by then
    meeting.mkdir()
    command = ("--nodes=2", "--fault", fault, script(STEPS_TOGETHER))
    result = simulate(*command, env=environment(MEETING=str(meeting)))
    assert fired(result.stdout, fault) and f"fault {fault}: SIGCONT to node 1\n" in result.stdout
    longest = dict(re.findall(r"\[node (\d)\] longest (.+)\n", result.stdout))
    assert float(longest["1"].removesuffix(" after a pause")) > 1.4
    assert longest["1"].endswith(" after a pause") and not longest["0"].endswith(" after a pause")


def test_a_fault_that_never_fires_is_an_error(script):
    result = simulate("--fault=kill:rank=0,step=1000", script(STEPS), code=3)
    assert re.search(r"\] fault kill:rank=0,step=1000 never fired: .*\b100\n", result.stdout)
    assert rows(result.stdout)["0"].code == 0


def test_an_interrupt_waits_for_a_node_that_takes_longer_than_other_programs_have(script):
    process = start("-m", "launch", "simulate", script(STUBBORN))
    read_until(process, "pids ")
    process.send_signal(signal.SIGINT)
    assert rows(finish(process, 130).stdout)["0"].meaning == "ended by SIGINT to the simulation"


@pytest.mark.thorough
def test_nothing_survives_the_simulation(script):
    """A process that ignores SIGTERM, its child in another session and the temporary folder are removed."""
    process = start("-m", "launch", "simulate", "--nodes=2", script(STUBBORN))
    lines, pids = [], []
    while len(pids) < 4 and (line := process.stdout.readline()):
        lines.append(line)
        pids += map(int, re.findall(r"\d+", line.partition("] pids ")[2]))
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == 143, output + errors
    assert "ending all nodes" in output and len(pids) == 4
    meaning = "ended by SIGTERM to the simulation"
    assert {(row.code, row.meaning) for row in rows(output).values()} == {(137, meaning)}
    assert not [pid for pid in pids if alive(pid)]
    folder = re.search(r"folders=(\S+)", "".join(lines))[1]
    assert not os.path.exists(folder)


def test_a_limit_ends_all_nodes(script):
    result = simulate("--limit=0.5", "--nodes=2", script(ENDLESS), code=124)
    assert {row.meaning for row in rows(result.stdout).values()} == {"ended by --limit 0.5"}


def test_a_limit_ends_the_wait_for_a_node_that_takes_no_notice_of_an_eviction(script):
    stays = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN){ENDLESS}"
    words = ("--platform=kubernetes", "--fault=evict:node=0,step=1", "--limit=1")
    result = simulate(*words, script(stays), "--", f"--grace={LONGEST * 2}", code=124)
    assert rows(result.stdout)["0 run 2"].meaning == "ended by --limit 1"
