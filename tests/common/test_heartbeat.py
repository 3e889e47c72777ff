"""A heartbeat logs a line with the seconds when it is due, and not more often."""

import sys

from common.ground import exits, heartbeat
from common.ground.heartbeat import Heartbeat


def test_a_line_is_logged_when_it_is_due(monkeypatch):
    now, lines = 100.0, []
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    beats = Heartbeat(log=lines.append)
    for seconds in (0, 29, 31, 59, 62):
        now = 100.0 + seconds
        beats.beat("waiting")
    assert lines == ["waiting (31 s)", "waiting (62 s)"] and beats.seconds == 62
    often = Heartbeat(every=10, log=lines.append)
    for seconds in (70, 73, 83):
        now = 100.0 + seconds
        often.beat("waiting")
    assert lines[2:] == ["waiting (11 s)", "waiting (21 s)"]


def test_a_closed_output_is_ignored(monkeypatch, capsys, tmp_path):
    exits.print_line("one line")
    assert capsys.readouterr().out == "one line\n"
    with open(tmp_path / "closed", "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
    exits.print_line("lost")
