"""A heartbeat logs a line with the seconds when it is due, and not more often."""

import io
import sys
import threading
import types

import pytest

from bootfile.ground import errors, heartbeat
from bootfile.ground.heartbeat import Heartbeat, watched
from tests.conftest import names, wait_until


def test_a_line_is_logged_when_it_is_due(monkeypatch):
    now, lines = 100.0, []
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    monkeypatch.setattr(heartbeat, "print_line", lines.append)
    beats = Heartbeat()
    for seconds in (0, 29, 31, 59, 62):
        now = 100.0 + seconds
        beats.beat("waiting")
    assert lines == ["waiting (31 s)", "waiting (62 s)"] and beats.seconds == 62


def test_a_closed_output_is_ignored(monkeypatch, capsys, tmp_path):
    errors.print_line("one line")
    assert capsys.readouterr().out == "one line\n"
    with open(tmp_path / "closed", "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
    errors.print_line("lost")


def test_what_the_encoding_of_the_output_lacks_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    errors.print_line("resumed from /数据/step_3.pt")
    assert written.getvalue() == b"resumed from /\\u6570\\u636e/step_3.pt\n"


@pytest.mark.parametrize("encoding", ["no such encoding", "hex", "undefined", 5, None])
def test_an_output_of_another_kind_is_written_to(encoding, monkeypatch):
    output = io.StringIO()
    replaced = types.SimpleNamespace(write=output.write, flush=output.flush, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", replaced)
    errors.print_line("数据")
    assert output.getvalue() == "数据\n"


def test_a_write_that_takes_long_is_named_once(monkeypatch):
    lines = []
    monkeypatch.setattr(heartbeat, "print_line", lines.append)
    monkeypatch.setattr(heartbeat, "EVERY", 1000.0)
    with watched("/quick"):
        pass
    monkeypatch.setattr(heartbeat, "EVERY", 0.01)
    with watched("/mount"):
        wait_until(lambda: lines)
        with watched("/later"):  # a second line about the first would come before
            wait_until(lambda: "/later" in lines[-1])
    line, _ = lines
    assert names(line, "/mount", "not answered", "0 s")


def test_a_machine_without_room_for_a_thread_does_not_end_what_is_watched(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with watched("folder"):
        done = True
    assert done
