"""How a job can end: its last line arrives and its code is right, whatever has replaced sys.stderr."""

import json
import re
import subprocess

import pytest

from bootfile.processes.ends import MemoryKills
from common.distributed import launcher
from common.ground import endings
from tests.conftest import QUICK, ROOT, environment, run

# It forks a process for each way to end. Each goes to the end of the script, as a job does.
SCRIPT = '''
import io, json, os, sys, threading
sys.path.insert(0, {root!r})
from common.distributed.entry import entry
from bootfile.ground.errors import BadInput

class Tee:
    """Write to the stream before, and to a file, as scripts do that keep a log."""
    def __init__(self, stream, file):
        self.stream, self.file = stream, file
    def write(self, text):
        self.file.write(text)
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()

def fail():
    raise ValueError("the thread has ended")

@entry
def main():
    exec(before)
    exec(ways[way])

def print_nothing(*error):
    pass

def take_stderr(*error):
    sys.stderr = io.StringIO()
    sys.usual_hook(*error)

before, ways, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
if "torch" in before:
    import torch
codes = dict()
for way in ways:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.path.join(folder, way), os.O_WRONLY | os.O_CREAT), 2)
        main()
        break
    codes[way] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(codes))
'''
AT_RANK = r"(\[rank0\]: )?"
WAYS = {  # way -> code, exit code, pattern of the line that must arrive once
    "bad input": ("raise BadInput('a value is wrong')", 2, "error: a value is wrong$"),
    "missing package": (
        "import no_such_package.inside", 2, "error: No module named 'no_such_package', .*: pip install",
    ),
    "missing module of ours": (
        "import common.no_such_module", 1, f"{AT_RANK}ModuleNotFoundError: No module named 'common.no",
    ),
    "missing name": (
        "from os import no_such_name", 1, f"{AT_RANK}ImportError: cannot import name 'no_such_name'",
    ),
    "syntax": ("exec(compile('a b', 'late.py', 'exec'))", 1, f"{AT_RANK}SyntaxError: invalid syntax"),
    "interrupt": ("raise KeyboardInterrupt", 130, "error: interrupted$"),
    "exit with text": ("sys.exit('the text of the exit')", 1, "the text of the exit$"),
    "exit with 3": ("sys.exit(3)", 3, ""),
    "exit with -1": ("sys.exit(-1)", 255, ""),
    "exit with a status of os.system()": ("sys.exit(256)", 1, ""),
    "exit": ("sys.exit()", 0, ""),
    "exit with an empty text": ("sys.exit('')", 1, "\\n"),
    "memory": ("raise MemoryError('out of memory')", 1, f"{AT_RANK}MemoryError: out of memory"),
    "assertion": ("assert 1 == 2, 'one is not two'", 1, f"{AT_RANK}AssertionError: one is not two"),
    "thread": (
        "thread = threading.Thread(target=fail); thread.start(); thread.join()", 0,
        "ValueError: the thread has ended",
    ),
    "generator": ("raise StopIteration('the data has ended')", 1, f"{AT_RANK}StopIteration: the data has"),
    "return": ("", 0, ""),
}  # fmt: skip
REPLACED = {  # what the job has replaced -> code
    "nothing": "",
    "group": "torch.distributed.init_process_group("
    "'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
    "hook that takes sys.stderr": "sys.usual_hook = sys.excepthook; sys.excepthook = take_stderr",
    "hook that prints nothing": "sys.excepthook = print_nothing",
    "stderr": "sys.stderr = io.StringIO()",
    "no stderr": "sys.stderr = None",
    "tee": "sys.stderr = Tee(sys.stderr, open(os.devnull, 'w'))",
}


@pytest.mark.thorough
@pytest.mark.parametrize("replaced", REPLACED)
def test_the_last_line_of_a_job_arrives_whatever_has_replaced_the_streams(replaced, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.replace("{root!r}", repr(str(ROOT))))
    codes = json.dumps({way: code for way, (code, _, _) in WAYS.items()})
    result = run(script, REPLACED[replaced], codes, tmp_path, env=environment(), fresh=True)
    assert json.loads(result.stdout) == {way: code for way, (_, code, _) in WAYS.items()}
    for way, (_, _, pattern) in WAYS.items():
        text = (tmp_path / way).read_text()
        if pattern:
            assert len(re.findall(f"^{pattern}", text, re.MULTILINE)) == 1, (way, text)
        else:
            assert text == "", way


def test_a_package_that_is_missing_in_a_job_with_a_process_group_is_one_line(tmp_path):
    text = (ROOT / "jobs/train_ddp.py").read_text(encoding="utf-8")
    folder = "os.path.dirname(os.path.dirname(os.path.abspath(__file__)))"
    text = text.replace(folder, repr(str(ROOT)))
    text = text.replace("    torch.manual_seed(args.seed)\n", "    import no_such_package\n", 1)
    job = tmp_path / "job.py"
    job.write_text(text, encoding="utf-8")
    ended = run(job, *QUICK, "--enable_gpu=false", f"--output_dir={tmp_path / 'out'}", code=2)
    assert re.fullmatch("error: No module named 'no_such_package', which .*\n", ended.stderr)


COLLECTOR = """
import gc, sys
usual = gc.get_threshold()
{before}
from common.distributed.entry import entry
while_importing = gc.get_threshold()[0]
import torch

@entry
def main():
    print(while_importing > usual[0], gc.get_freeze_count() > 100_000)
    print(gc.get_threshold() == usual, gc.isenabled())

main()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("before", ["pass", "import torch"])
def test_no_search_for_garbage_among_the_modules_that_a_job_imports(before):
    """If torch is there already, as in a notebook, what the user has made must not stay for ever."""
    shown = run(
        "-c", COLLECTOR.format(before=before), fresh=True, env=environment(PYTHONPATH=str(ROOT))
    ).stdout
    is_first = before == "pass"
    assert shown.split() == [str(is_first), str(is_first), "True", "True"]


@pytest.mark.parametrize("consequence", [endings.LOST_CONTACT, endings.NO_RENDEZVOUS])
@pytest.mark.parametrize("cause, code", [("exit 41", 41), ("kill -SEGV $$", 139)])
def test_the_process_that_failed_first_gives_the_code_of_the_node(cause, code, consequence, capfd):
    """It may end after one that has lost it, and it need not be the first in their order."""
    first = subprocess.Popen(["sh", "-c", f"exit {consequence}"], start_new_session=True)
    first.wait()
    second = subprocess.Popen(["sh", "-c", cause], start_new_session=True)
    assert launcher._wait([first, second], 4, [], 1.0, " on node n", MemoryKills()) == code
    assert "rank 5 on node n" in capfd.readouterr().err
