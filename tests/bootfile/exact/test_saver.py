"""The saver copies into reused memory, has one write in flight, and reports errors."""

import errno
import os
import threading

import pytest
import torch

from bootfile.exact import checked_files, digest, files
from bootfile.exact.background import HostCopies, size_of
from bootfile.exact.saver import Saver, _Task, find_infinite
from bootfile.histories import read_states
from bootfile.records import write_state
from tests.conftest import CAN_FORK, LONGEST, names, run_ranks


def test_training_goes_on_while_a_copy_is_written(tmp_path):
    saver, go, seen = Saver(str(tmp_path), 1, print), threading.Event(), []
    weight = torch.zeros(4)

    def write(copy):
        go.wait()
        seen.append(copy["weight"].tolist())

    saver._submit(_Task("best.pth", lambda: {"weight": weight}, write))
    weight += 1  # the optimizer does not wait
    saver.collect()
    assert not seen
    go.set()
    assert saver.finish() == [] and seen == [[0.0] * 4]


def _state(step: int, weight: torch.Tensor) -> dict:
    objects = {"model": {"weight": weight}, "optimizer": {"momentum": torch.ones(4)}}
    return {"format": 3, "step": step, "objects": objects}


def test_reports_and_the_end_of_an_epoch_do_not_wait_for_the_writes_before(tmp_path):
    """The thread that writes is busy all the time. Digests come in their order, and none is lost."""
    saver, go, weight, written = Saver(str(tmp_path), 3, print), threading.Event(), torch.zeros(4), []
    write = lambda tensors: written.append(tensors["weight"].tolist())  # noqa: E731
    saver._writer._pool.submit(go.wait)
    saver.save_checkpoint(5, "run", lambda: _state(5, weight), True)
    weight += 1  # a job may write other weights than those that it has saved
    saver.save_weights("epoch_1.pth", 5, "run", None, lambda: _state(5, weight)["objects"], write)
    weight += 1
    saver.collect()
    assert not written and saver.durable == 0 and not go.is_set()
    go.set()
    saver.save_weights("epoch_2.pth", 9, "run", None, lambda: _state(9, weight)["objects"], write)
    assert saver.finish() == [] and saver.durable == 5
    assert written == [[1.0] * 4, [2.0] * 4]
    assert (
        checked_files.read(str(tmp_path / "checkpoints" / "step_5.pt"))["objects"]["model"]["weight"].sum()
        == 0
    )
    lines = read_states(str(tmp_path))
    assert list(lines) == [5, 9]


def test_a_checkpoint_is_digested_while_it_is_written_and_gets_its_name_last(tmp_path, monkeypatch):
    path, written, seen = tmp_path / "checkpoints" / "step_5.pt", threading.Event(), []
    save, summarize = files._Target.save, digest.summarize

    def save_and_tell(*given):
        save(*given)
        written.set()

    def summarize_late(*given):
        seen.append((written.wait(LONGEST), path.exists()))
        return summarize(*given)

    monkeypatch.setattr(files._Target, "save", save_and_tell)
    monkeypatch.setattr(digest, "summarize", summarize_late)
    saver = Saver(str(tmp_path), 3, print)
    saver.save_checkpoint(5, "run", lambda: _state(5, torch.zeros(4)), True)
    assert saver.finish() == [] and seen == [(True, False)]
    assert path.exists() and read_states(str(tmp_path))[5]["saved"] is True


def test_what_the_digest_refuses_is_not_saved(tmp_path):
    saver = Saver(str(tmp_path), 3, lambda line: None)
    saver.save_checkpoint(5, "run", lambda: _state(5, torch.zeros(4)), True)
    saver.save_checkpoint(8, "run", lambda: _state(8, torch.full((4,), float("nan"))), True)
    (reason,) = saver.finish()
    assert names(reason, "step_8.pt", "not saved", "not finite")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_5.pt", "step_5.pt.json"]
    assert list(read_states(str(tmp_path))) == [5] and saver.durable == 5


def test_a_write_that_fails_takes_its_line_back(tmp_path, monkeypatch):
    saver = Saver(str(tmp_path), 3, lambda line: None)
    monkeypatch.setattr(files._Target, "save", fail(errno.ENOSPC, 2))
    saver.save_checkpoint(5, "run", lambda: _state(5, torch.zeros(4)), True)
    assert len(saver.finish()) == 1 and not os.listdir(tmp_path / "checkpoints")
    assert read_states(str(tmp_path))[5]["saved"] is False


def test_weights_that_cannot_be_copied_do_not_touch_the_checkpoint_in_flight(tmp_path):
    saver, go = Saver(str(tmp_path), 3, lambda line: None), threading.Event()
    saver.saved = lambda step: go.wait()

    def fail():
        raise MemoryError("no memory")

    saver.save_checkpoint(5, "run", lambda: _state(5, torch.zeros(4)), True)
    saver.save_weights("epoch_1.pth", 5, "run", None, fail, lambda tensors: None)
    go.set()
    (reason,) = saver.finish()
    assert names(reason, "epoch_1.pth", "not saved", "no memory")
    assert read_states(str(tmp_path))[5]["saved"] is True


def test_a_restart_deletes_the_digests_of_later_steps(tmp_path):
    for step, planned in ((5, True), (8, True), (10, True), (12, True)):
        line = digest.summarize(step, _state(step, torch.full((4,), 1.0))["objects"])
        write_state(str(tmp_path), line | {"planned": planned, "saved": True})
    saver = Saver(str(tmp_path), 3, print)
    saver.resume_at(10)
    assert list(read_states(str(tmp_path))) == [5, 8, 10]


def test_memory_is_used_again():
    copies = HostCopies()
    weight = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    first, second = (copies.make({"a": [weight, (weight,)]})["a"][0] for _ in range(2))
    assert first.data_ptr() == second.data_ptr() != weight.data_ptr()
    assert first.stride() == weight.stride() and torch.equal(first, weight)


def fail(reason, arguments=1):
    """Return a function that fails with this error."""

    def write(*given):
        assert len(given) == arguments
        raise OSError(reason, os.strerror(reason))

    return write


def test_an_error_is_reported_once_and_forgotten_after_a_success(tmp_path):
    lines: list[str] = []
    saver = Saver(str(tmp_path), 1, lines.append)
    saver._submit(_Task("best.pth", dict, fail(errno.ENOSPC)))
    (reason,) = saver.finish()
    assert names(reason, "best.pth", "not saved", "No space left on device") and len(lines) == 1
    saver._submit(_Task("best.pth", dict, lambda copy: None))
    assert saver.finish() == [] and len(lines) == 1


@pytest.mark.parametrize(
    ("reason", "durable", "is_hopeless"),
    [(errno.EROFS, 0, True), (errno.EROFS, 4, False), (errno.ENOSPC, 0, False)],
)
def test_a_file_system_that_takes_no_checkpoint_at_all(tmp_path, reason, durable, is_hopeless):
    """A full disk may have space again, and a run with checkpoints keeps them."""
    saver = Saver(str(tmp_path), 1, lambda line: None)
    saver.durable = durable
    for _ in range(3):
        assert not saver.hopeless
        saver._submit(_Task("epoch_1.pth", dict, fail(reason)))  # weights do not count
        saver._submit(_Task("step_8.pt", dict, fail(reason)))
        saver.collect(wait=True)
    assert bool(saver.hopeless) == is_hopeless


def test_weights_that_are_not_written_leave_the_checkpoint_of_the_step(tmp_path):
    saver = Saver(str(tmp_path), 1, lambda line: None)
    saver.submitted = 8
    saver._submit(_Task("epoch_1.pth", dict, fail(errno.ENOSPC)))
    saver.collect(wait=True)
    assert saver.submitted == 8


def test_sizes_and_finiteness():
    state = {"a": torch.zeros(10), "b": [torch.zeros(3, dtype=torch.int64), 5], "c": (torch.ones(2),)}
    assert size_of(state) == 40 + 24 + 8
    tensors = {"a": torch.tensor([0.0, float("nan")]), "b": torch.tensor(float("inf")), "c": torch.ones(2)}
    tensors["of 8 bits"] = torch.zeros(3).to(torch.float8_e4m3fn)
    assert find_infinite(tensors | {"extra": [1]}) == {"a", "b"}


def test_a_rank_that_cannot_save_alone_takes_its_line_back(tmp_path, monkeypatch):
    def refuse(*given, **facts):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "write", refuse)
    monkeypatch.setattr("bootfile.processes.ranks.is_first", lambda: False)
    with pytest.raises(OSError, match="full"):
        Saver(str(tmp_path), 3, print).write_alone(_state(7, torch.zeros(4)), "run")
    assert read_states(str(tmp_path))[7]["saved"] is False


def test_a_state_in_memory_follows_the_newest_checkpoint_that_is_not_after_it(tmp_path):
    first = Saver(str(tmp_path), 3, print, keep_every=10)
    for step in (10, 20, 30):  # that of step 30 is of a process that was lost before the others had it
        first.save_checkpoint(step, "run", lambda step=step: _state(step, torch.zeros(4)), True)
    assert first.finish() == []
    second = Saver(str(tmp_path), 3, print)
    second.resume_at(29, from_memory=True)
    assert (second.durable, second.keep_every) == (20, 10)


JOB = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from bootfile.processes import ranks
from bootfile.exact.saver import Saver
from bootfile.exact import dtensors

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 7)).sum().backward()
optimizer.step()
gathered, full = [], dtensors.full
dtensors.full = lambda each: gathered.append(dtensors.is_dtensor(each)) or full(each)


def capture():
    objects = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {"format": 3, "step": 3, "objects": objects}


for name, by_rank in (("sharded", True), ("full", False)):
    os.makedirs(folder := os.path.join(sys.argv[1], name), exist_ok=True)
    saver = Saver(folder, 3, print, True, by_rank)
    saver.save_checkpoint(3, "run", capture, True)
    print(name, sum(gathered) > 0, saver.finish())
"""


@pytest.mark.skipif(not CAN_FORK, reason="fully_shard() needs torch 2.6, too")
def test_a_sharded_save_gathers_no_tensor_and_has_the_digest_of_a_full_one(tmp_path):
    jobs = run_ranks("-c", JOB, tmp_path)
    assert [job.stdout for job in jobs] == ["sharded False []\nfull True []\n"] * 2
    lines = [read_states(str(tmp_path / name))[3] for name in ("sharded", "full")]
    assert lines[0] == lines[1] and len(lines[0]["parts"]) > 20 and lines[0]["saved"]
    for name in ("sharded", "full"):
        state = checked_files.read(str(tmp_path / name / "checkpoints" / "step_3.pt"))
        assert digest.summarize(3, state["objects"])["parts"] == lines[0]["parts"]


def test_without_room_for_a_thread_a_save_and_a_read_take_longer(tmp_path, monkeypatch):
    saver = Saver(str(tmp_path), 3, print)
    saver.save_checkpoint(5, "run", lambda: _state(5, torch.zeros(4)), True)  # its own thread is there now
    assert saver.finish() == []

    def fail_to_start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    saver.save_checkpoint(8, "run", lambda: _state(8, torch.ones(4)), True)
    assert saver.finish() == [] and read_states(str(tmp_path))[8]["saved"] is True
    assert checked_files.read(str(tmp_path / "checkpoints" / "step_8.pt"))["step"] == 8
