"""A notice of preemption at one node: all ranks save after the same step, and the run continues exactly."""

import itertools
import json
import os
import re
import signal
import threading
from types import SimpleNamespace

import pytest

from bootfile import Preemption
from bootfile.histories import read_states
from bootfile.processes import notices, signals
from tests.conftest import (
    LONGEST,
    QUICK,
    ROOT,
    cases,
    environment,
    finish,
    free_port,
    names,
    read_until,
    refused,
    run,
    start,
    wait_until,
)
from tests.support.exact import changed, facts
from tests.support.metadata_server import TIME, MetadataServer

# Its last rank waits at step 5 until it is asked to stop, unless it continues: the others are in the vote.
LOOP = """
import os, sys, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from bootfile import Exact, Preemption, torch_loader, usual
from bootfile.processes import signals

out, source, address, waits = sys.argv[1:]
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch_loader(DataLoader(data, 4, sampler=DistributedSampler(data)), torch.device("cpu"), epochs=2)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
forward = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
plugins = [*usual(), Preemption(source, address or None)] if source else usual()
run = Exact(
    out, loader, model=model, forward=forward, optimizer=optimizer, save_every=100, plugins=plugins
)
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        if waits and loader.step == 5 and torch.distributed.get_rank() == 1:
            print("step 5", flush=True)
            signals.wait()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(forward(inputs), targets).backward()
        optimizer.step()
        if run.end_step().save:
            run.save()
        print("ended", loader.step, flush=True)
run.close()
"""
# The same in a job; it has 5 steps in each of its epochs
STEP = "loss = criterion(logits, targets)"
WAIT = """if train_loader.step == 7 and rank == 1 and "WAITS" in os.environ:
                from bootfile.processes import signals; print("step 7", flush=True); signals.wait()
            loss = criterion(logits, targets)"""


def start_nodes(*command, variables: list[dict], arguments=((), ())) -> list:
    """Start a job of one process on each of two nodes."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return [
        start(*command, *arguments[rank], env=environment(**shared, RANK=str(rank), **variables[rank]))
        for rank in range(2)
    ]


@pytest.fixture
def loop(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOOP}")

    def start_loop(folder, *arguments):
        return start_nodes(script, tmp_path / folder, variables=[{}, {}], arguments=arguments)

    return start_loop


@pytest.mark.parametrize("cloud", cases(notices.CLOUDS, "aws", "azure", "alibaba"))
def test_a_notice_at_one_node_saves_the_same_step_on_all_ranks(cloud, loop, tmp_path):
    whole = loop("whole", *[("", "", "")] * 2)
    [finish(job) for job in whole]
    with MetadataServer(cloud) as first, MetadataServer(cloud) as second:
        jobs = loop("out", (cloud, first.address, "1"), (cloud, f"http://{second.address}/", "1"))
        before = ["", "".join(read_until(jobs[1], "^step 5$"))]
        assert not second.has_notice and not first.has_notice
        second.has_notice = True
        ended = [text + finish(job, 143).stdout for text, job in zip(before, jobs, strict=True)]
        assert first.requests and second.requests
    assert [re.findall("^ended (.*)", text, re.MULTILINE)[-1:] for text in ended] == [["4"], ["4"]]
    for text in ended:
        line, = re.findall("^notice of preemption by .*", text, re.MULTILINE)  # fmt: skip
        assert names(line, cloud, "node 1")
    assert "stopped as asked after step 5; the newest checkpoint is that of step 5" in ended[0]
    # the machine that takes its place has no notice
    with MetadataServer(cloud) as server:
        [finish(job) for job in loop("out", *[(cloud, server.address, "")] * 2)]
    states = [read_states(str(tmp_path / folder)) for folder in ("whole", "out")]
    assert states[0][max(states[0])]["parts"] == states[1][max(states[1])]["parts"] and 5 in states[1]


@pytest.mark.thorough
def test_a_job_says_who_asked_and_continues_exactly(tmp_path):
    script = changed("train_ddp.py", tmp_path / "job.py", (STEP, WAIT))
    command = (script, *QUICK, "--batch_size=240", "--epochs=3", "--report_every=1")
    out = tmp_path / "out"
    with MetadataServer("aws") as first, MetadataServer("aws") as second:
        variables = [
            {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{each.address}", "WAITS": "1"}
            for each in (first, second)
        ]
        words = (*command, "--preemption=aws", f"--output_dir={out}")
        second.has_notice = True
        jobs = start_nodes(*words, variables=variables)
        ended = [finish(job, 143).stdout for job in jobs]
    reason = f"notice of preemption by aws for node 1 (terminate at {TIME})"
    assert f"\n{reason}: stopping at the next step" in ended[0]
    end = [json.loads(line) for line in (out / "ends.jsonl").read_text().splitlines()][-1]
    assert (end["code"], end["reason"]) == (143, reason)
    stopped = end["step"]
    assert 1 <= stopped < 15 and (out / "checkpoints" / f"step_{stopped}.pt").exists()
    again = start_nodes(*command, f"--output_dir={out}", variables=[{}, {}])
    said = "".join(finish(job).stdout for job in again)
    assert f"the end of the training before: {reason} at step {stopped} (exit code 143)" in said
    whole = start_nodes(*command, f"--output_dir={tmp_path / 'whole'}", variables=[{}, {}])
    [finish(job) for job in whole]
    found = [facts(each) for each in (out, tmp_path / "whole")]
    assert found[0]["samples"] == found[1]["samples"] and found[0]["weights"] == found[1]["weights"]


@pytest.mark.parametrize("kind", cases(["wrong answers", "nothing listens"], "nothing listens"))
def test_a_server_that_answers_wrong_is_named_once_and_asked_again(kind, tmp_path):
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    answers = itertools.cycle([b"HTTP/1.1 500 Error\r\n\r\n", head + b"\xff<html>", b""])
    script = changed("train.py", tmp_path / "job.py", (STEP, WAIT.replace("rank == 1 and ", "")))
    words = (script, *QUICK, "--batch_size=240", "--epochs=3", f"--output_dir={tmp_path / 'out'}")
    with MetadataServer() as server:
        server.raw = lambda: [next(answers)]
        address = server.address if kind == "wrong answers" else f"127.0.0.1:{free_port()}"
        job = start(*words, f"--preemption=google={address}", env=environment(WAITS="1"))
        seen = read_until(job, "^step 7$")
        wait_until(lambda: len(server.requests) >= 4 or kind == "nothing listens", job)
        job.send_signal(signal.SIGTERM)
        said = "".join(seen) + finish(job, 143).stdout
    [warning] = re.findall("^warning: notices of preemption.*", said, re.MULTILINE)
    assert names(warning, "google", "node") and "notice of preemption by" not in said
    end = (tmp_path / "out" / "ends.jsonl").read_text().splitlines()[-1]
    assert json.loads(end)["reason"] == "SIGTERM"


def test_a_file_is_a_notice_and_no_job_asks_by_itself(tmp_path):
    file = tmp_path / "notice"
    script = changed("train.py", tmp_path / "job.py", (STEP, WAIT.replace("rank == 1 and ", "")))
    words = (script, *QUICK, "--batch_size=240", "--epochs=3", f"--output_dir={tmp_path / 'out'}")
    with MetadataServer() as server:
        clouds = ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "GCE_METADATA_HOST")
        variables = dict.fromkeys(clouds, f"http://{server.address}")
        job = start(*words, f"--preemption={file}", env=environment(WAITS="1", **variables))
        read_until(job, "^step 7$")
        file.touch()
        assert names(finish(job, 143).stdout, f"notice of preemption by {file}", "the file exists")
        assert "the end of the training before: notice" in run(*words, env=environment(**variables)).stdout
        assert server.requests == []


def test_one_object_reads_notices_of_a_second_run(tmp_path, monkeypatch):
    """The plugins of a notebook may be a list that it gives to each Exact."""
    asks = threading.Event()
    monkeypatch.setattr(signals, "ask", lambda *_: asks.set())
    plugin = Preemption(tmp_path / "notice")
    for _ in range(2):
        plugin.begin(SimpleNamespace(writes=True), 0)
        (tmp_path / "notice").touch()
        assert asks.wait(LONGEST)
        plugin.close(None)
        asks.clear()


def test_another_source_is_refused_before_the_training(tmp_path):
    line = refused("jobs/train.py", *QUICK, f"--output_dir={tmp_path / 'out'}", "--preemption=gcp")
    assert names(line, "--preemption", "gcp", "google")
    line = refused("jobs/train_exact.py", *QUICK, "--elastic=true", f"--preemption={os.sep}notice")
    assert names(line, "--preemption", "--elastic")
