"""No value of a secret option is in a log, a record, a checkpoint or a report."""

import re
import signal

from tests.conftest import finish, run, start_until
from tests.support.exact import changed

OPTIONS = ("sk", "ak", "pin", "webhook", "bearer", "pat", "cookie", "header", "marked", "hook_url")


def test_values_of_secret_options_are_nowhere(tmp_path):
    """The options are the user's own; one is not known to the job. A changed secret does not refuse the
    restart, and another option's change is still seen."""
    place, out = "    args = parser.parse_args()\n", tmp_path / "out"
    own = "".join(f'    data.add_argument("--{name}")\n' for name in OPTIONS if name != "marked")
    own += '    from common.console.arguments import secret\n    data.add_argument("--marked", type=secret)\n'
    job = changed("train.py", tmp_path / "job.py", (place, own + place))
    usual = (job, "--dataset=digits", "--width=8", "--batch_size=64", "--ignore_unknown=true")
    usual += ("--report_every=1", f"--output_dir={out}")
    values = {name: f"V{name}hunter2" for name in (*OPTIONS, "api_key", "unknown")}
    values["hook_url"] = f"https://hooks.host/services/{values['hook_url']}"
    words = [word for name, value in values.items() for word in (f"--{name}", value)]
    stopped, before, continue_it = start_until(
        *usual, "--epochs=400", "--lr=0.2", "--resume=never", *words, at="step=4/"
    )
    stopped.send_signal(signal.SIGTERM)
    continue_it()
    result = finish(stopped, 143)
    run("-m", "launch", "report", out, "--to", out / "report.html")
    shown = before + result.stdout + result.stderr
    shown += "".join(path.read_bytes().decode("latin-1") for path in out.rglob("*") if path.is_file())
    assert "hunter2" not in shown and "<html" in shown and '"lr": 0.2' in shown
    line, fill_in = re.search(r"^to continue: (.*)\n\(fill in: (.*)\)$", result.stdout, re.MULTILINE).groups()
    assert "--lr=0.2" in line and "'***'" in line and line.endswith(" --resume auto"), "not never"
    assert fill_in.split(", ") == [f"--{name}" for name in values]

    words = [word.replace("hunter2", "other") for word in words]
    again = run(*usual, "--max_steps=12", "--lr=0.1", *words).stdout
    assert "resumed from" in again and re.search("schedule .*checkpoint .*another", again)
