"""A stop signal reaches every process, has a time limit, and does not harm workers."""

import os
import re
import signal
import subprocess
import textwrap
import threading
import time

import pytest

from bootfile.processes import signals, texts
from tests.conftest import QUICK, ROOT, finish, processes_of, read_until, start, start_until
from tests.support.exact import changed

STUCK = textwrap.dedent(f"""
    import sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from bootfile.processes import signals
    signals.watch(1.0)
    print("ready", flush=True)
    {{wait}}
""")
DIGITS = (*QUICK, "--batch_size=240", "--report_every=1")
# C code that never returns to the interpreter, as inside a collective
LOCKED = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
# prints the seconds of each timer that the process starts
TIMED = """
start_timer = signals._call_after
signals._call_after = lambda at, *rest: print("timer", at, flush=True) or start_timer(at, *rest)
print("timed", flush=True)
"""
# after those of the test comes SIGUSR2, and the first of them that asks the job to stop is printed
FIRST = """
import os
sys.stdin.readline(), os.kill(os.getpid(), 12), signals.wait()
print(f"\\nfirst: {signals.received()[0]}", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGUSR2, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),
        (signal.SIGXCPU, 152),
        (signal.SIGPWR, 158),
    ],
)
def test_a_process_that_hangs_exits_after_its_grace(number, code):
    process = start("-c", STUCK.format(wait=TIMED + LOCKED))
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "timed\n"]
    begin = time.monotonic()
    process.send_signal(number)
    process.send_signal(number)
    result = finish(process, code)
    assert time.monotonic() - begin > 0.9 and result.stdout.count("timer 1.0\n") == 1
    assert re.search(rf"^{number.name}: stopping .*\b1 s$", result.stdout, re.MULTILINE)
    assert "error: not stopped within 1 s" in result.stderr


def test_a_second_interrupt_ends_a_stuck_process_at_once():
    process = start("-c", STUCK.format(wait=LOCKED).replace("watch(1.0)", "watch(1000)"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("SIGINT: stopping ")
    time.sleep(0.6)  # longer than one key press
    process.send_signal(signal.SIGINT)
    result = finish(process, 130)
    assert re.fullmatch("error: interrupted again\\b.*without .*checkpoint\n", result.stderr)


AGAIN = """
import sys, torch; sys.path.insert(0, ROOT)
from bootfile.processes import signals
for _ in range(2):  # an exception has ended the first loop
    signals.watch(5.0, torch.distributed.HashStore())
signals.unfollow()
"""


def test_a_loop_ends_although_an_exception_has_ended_the_one_before():
    finish(start("-c", AGAIN.replace("ROOT", repr(str(ROOT)))), 0)


@pytest.mark.parametrize(
    ("number", "own", "shown"),
    [
        (signal.SIGUSR1, "signal.signal(signal.SIGUSR1, lambda *_: print('mine', flush=True))", "mine"),
        (signal.SIGUSR1, "faulthandler.register(signal.SIGUSR1, file=sys.stdout)", "most recent call first"),
        (signal.SIGHUP, "signal.signal(signal.SIGHUP, signal.SIG_IGN)", ""),  # as nohup does
    ],
)
def test_the_own_handler_of_a_job_is_kept(number, own, shown):
    script = f"import faulthandler, signal, sys\n{own}\n{STUCK.format(wait=FIRST)}"
    process = start("-c", script, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate("\n", timeout=60)
    assert shown in output and "\nfirst: 12" in output


def test_only_a_process_of_the_job_can_stop_it(monkeypatch, capsys):
    """The store of a job on one machine is open to every user of the machine."""
    import torch

    store = torch.distributed.HashStore()
    for name, value in (("_rank", 0), ("_token", "c0ffee"), ("_asked", threading.Event())):
        monkeypatch.setattr(signals, name, value)
    monkeypatch.setattr(signals, "_call_after", lambda *_: None)
    for forged in ("1", "1 15 ", "1 15 c0ffe", "bad \xff"):
        texts.write(store, signals._KEY, forged)
        signals.look(store)
    assert not signals.asked() and capsys.readouterr().out == ""
    texts.write(store, signals._KEY, "1 10 c0ffee")
    signals.look(store)
    assert signals.asked() and signals.exit_code() == 138
    assert capsys.readouterr().out.startswith("SIGUSR1 at rank 1: stopping ")


def test_the_signal_is_named_before_a_run_ends():
    """A store may be slower than the next step, which ends the run."""
    ends = """
while not signals.asked():
    pass
Slow.may_go.set()
signals.unfollow()
print("stopped", flush=True)
os._exit(0)
"""
    script = STUCK.format(wait=ends).replace("watch(1.0)", "watch(400, Slow())")
    slow = """
import os, threading, time
class Slow:
    may_go = threading.Event()
    def add(self, *_): return 0
    def set(self, *_): self.may_go.wait(); time.sleep(0.5)
"""
    script = script.replace("signals.watch", "signals._MOST_TO_SAY = 400\nsignals.watch")
    process = start("-c", slow + script)
    read_until(process, "ready")
    process.send_signal(signal.SIGTERM)
    assert re.fullmatch("SIGTERM: stopping .* 400 s\nstopped\n", finish(process).stdout)


def test_a_rank_hears_of_a_signal_that_is_not_in_the_store_yet(monkeypatch, capsys):
    """The vote of a step may be faster than the store."""
    for name, value in (("_rank", 0), ("_code", 143), ("_asked", threading.Event())):
        monkeypatch.setattr(signals, name, value)
    monkeypatch.setattr(signals, "_call_after", lambda *_: None)
    signals.hear(1, 10)
    signals.hear(2, 15)
    assert signals.asked() and signals.exit_code() == 138
    assert capsys.readouterr().out.startswith("SIGUSR1 at rank 1: stopping") and signals.received() == (0, "")
    monkeypatch.setattr(signals, "_number", 0)
    signals.ask(signal.SIGINT)  # a later one of its own: all ranks end with the code of the first
    assert signals.exit_code() == 138


@pytest.mark.parametrize(
    "launcher",
    [
        (),
        pytest.param(
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"), marks=pytest.mark.thorough
        ),
    ],
)
def test_a_rank_tells_the_others_which_signal_it_got(launcher, tmp_path):
    own = () if launcher else ("--processes_per_node=2",)
    job = start(
        *launcher, "jobs/train_ddp.py", *DIGITS, *own, f"--output_dir={tmp_path}", fresh=bool(launcher)
    )
    read_until(job, "^epoch=1 step=2/")
    os.kill(processes_of(job)[1], signal.SIGUSR1)
    result = finish(job, None)
    assert result.returncode == (1 if launcher else 138), "torchrun has one code for all errors"
    assert "\nSIGUSR1 at rank 1: stopping " in result.stdout
    assert list((tmp_path / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize("stuck", ["signals.unwind_within(400), time.sleep(1000)", "lock.acquire()"])
def test_an_interrupt_during_set_up_is_one_line(stuck):
    """This holds in Python code and in C code that never returns to the interpreter."""
    job = textwrap.dedent(f"""
        import sys, threading, time
        sys.path.insert(0, {str(ROOT)!r})
        from bootfile.processes import signals
        from common.distributed.entry import entry
        @entry
        def main():
            lock = threading.Lock()
            lock.acquire()
            print("ready", flush=True)
            {stuck}
        main()
    """)
    process = start("-c", job)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert finish(process, 130).stderr == "error: interrupted\n"


def test_ctrl_c_while_torch_is_loaded_is_one_line():
    job = start("-X", "importtime", "jobs/train.py", *QUICK)
    for line in job.stderr:
        if line.endswith(" common.distributed.entry\n"):
            break
    job.send_signal(signal.SIGINT)
    errors = [line for line in finish(job, 130).stderr.splitlines() if not line.startswith("import time:")]
    assert errors == ["error: interrupted"]


@pytest.mark.parametrize(
    ("processes", "moment"), [(2, "^topology "), (2, "^epoch=1 step=2/"), (1, "^evaluating")]
)
def test_ctrl_c_of_a_job(tmp_path, processes, moment):
    """A checkpoint is saved in training and in evaluation. A terminal signals the whole process group."""
    evaluate = "        val_sums = evaluation.evaluate("
    lines = f"        print('evaluating', flush=True)\n{evaluate}"
    script = changed("train_ddp.py", tmp_path / "job.py", (evaluate, lines))
    options = (*DIGITS, f"--processes_per_node={processes}", f"--output_dir={tmp_path / 'out'}")
    job, _, continue_it = start_until(script, *options, start_new_session=True, at=moment)
    os.killpg(job.pid, signal.SIGINT)
    continue_it()
    result = finish(job, 130)
    assert "Traceback" not in result.stderr + result.stdout, result.stderr
    if moment == "^topology ":
        assert result.stderr.count("error: ") == 1 and "error: interrupted" in result.stderr
        assert not (tmp_path / "out" / "checkpoints").exists()
        return
    step, = re.findall(r"stopped\D* step (\d+)\b.* step \1\n", result.stdout)  # fmt: skip
    assert (tmp_path / "out" / "checkpoints" / f"step_{step}.pt").exists()


def test_workers_of_a_dataloader_survive_it():
    """If the whole process group is signalled, as in a container, the workers still deliver batches."""
    work = textwrap.dedent("""
        import os, signal, torch
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): time.sleep(0.2); return index
        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(
                Slow(), batch_size=2, num_workers=2, worker_init_fn=lambda worker: signals.ignore()
            )
            seen = []
            for batch in loader:
                if not seen: os.killpg(0, signal.SIGTERM), os.killpg(0, signal.SIGINT)
                seen += batch.tolist()
            print(seen, signals.asked(), flush=True)
    """)
    script = STUCK.format(wait="").replace("watch(1.0)", "watch(400)") + work
    result = finish(start("-c", script, start_new_session=True))
    assert "[0, 1, 2, 3, 4, 5, 6, 7] True" in result.stdout


def test_one_process_is_signalled_while_all_evaluate(tmp_path):
    """Processes do not communicate while they evaluate, but all stop soon."""
    slow = (
        "import runpy, sys; sys.path.insert(0, '.'); from common.compute import models\n"
        "from bootfile.processes import signals\n"
        "original = models._ResNet.forward\n"
        "def forward(self, images):\n"
        "    if not self.training:\n"
        "        print('evaluating', flush=True)\n"
        "        signals.wait()\n"
        "    return original(self, images)\n"
        "models._ResNet.forward = forward\n"
        "from bootfile.sampling import sampler\n"
        "start = sampler.SequentialBatchSampler.__init__\n"
        "def small(self, size, batch, *rest, **more): start(self, size, 4, *rest, **more)\n"
        "sampler.SequentialBatchSampler.__init__ = small\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    job = start(
        "-c", slow, "jobs/train_ddp.py", *QUICK, "--processes_per_node=2", "--batch_size=24",
        "--max_steps=2", "--grace=400", f"--output_dir={tmp_path}",
    )  # fmt: skip
    read_until(job, "evaluating")
    os.kill(processes_of(job)[1], signal.SIGTERM)
    result = finish(job, 143)
    assert result.stdout.count("evaluating") < 5  # two ranks have 23 batches each
    assert re.search(r"stopped\D* step 2\b.*checkpoint.* step 2\n", result.stdout)


def test_a_closed_terminal_and_five_more_signals_lose_no_save(tmp_path):
    command = ("jobs/train_ddp.py", *DIGITS, "--processes_per_node=2", f"--output_dir={tmp_path}")
    options = {"start_new_session": True, "at": "^epoch=1 step=2/"}
    job, _, continue_it = start_until(*command, "--save_every=1000000", **options)
    others = (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGHUP)
    os.killpg(job.pid, signal.SIGHUP)
    continue_it()
    # any of several signals that arrive together may be the first one, also for slower ranks: wait for it
    read_until(job, "^SIGHUP(: | at rank 1: )")
    for number in others:
        os.killpg(job.pid, number)
    said = r"stopped\D* step (\d+)\b.* step \1\n"
    result = finish(job, None)
    assert result.returncode in {128 + number for number in (signal.SIGHUP, *others)}
    step, = re.findall(said, result.stdout)  # fmt: skip
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.pt")] == [f"step_{step}.pt"]
    assert not list(tmp_path.rglob(".partial-*"))
