"""A mistake in a loop of one's own has a line in the run in which it is made."""

import concurrent.futures
import functools
import io
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from bootfile import Exact, Interval, Job, Plugin, SequentialBatchSampler, map_style_loader, torch_loader
from bootfile.exact import files
from bootfile.ground.errors import BadInput
from bootfile.processes import signals
from tests.conftest import names


class Loop:
    """A loop with an Exact, and the lines that it has said."""

    def __init__(self, folder, writes=True, **objects):
        self.is_clean = True  # each step begins without gradients
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        self.loader = torch_loader(DataLoader(data, 4), torch.device("cpu"), epochs=2)
        self.model = objects.pop("model", torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        if schedule := objects.pop("schedule", None):
            objects["scheduler"] = schedule(self.optimizer)
        if objects.pop("has_schedule", False):
            torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.lines = []
        self.run = Exact(
            folder, self.loader, model=self.model, optimizer=self.optimizer,
            job=Job(say=self.lines.append, writes=writes), **{"save_every": 3, **objects},
        )  # fmt: skip

    def step(self, inputs, targets, takes=True):
        if self.is_clean:
            self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(inputs), targets).backward()
        if takes:
            self.optimizer.step()

    def count(self, text):
        return sum(text in line for line in self.lines)


def do_nothing(loop):
    pass


def train(loop, ends=True, saves=True, before=do_nothing, after=do_nothing):
    """Train two epochs. ends, saves: whether the loop calls end_step() and save(). before: called before a
    save. after: called at the end of each step."""
    for _ in loop.loader.epochs_from(loop.run.resume()):
        for batch in loop.loader:
            loop.step(*batch)
            if ends and loop.run.end_step().save and saves:
                before(loop)
                loop.run.save()
            after(loop)
    loop.run.close()


class OtherKinds:
    """Arguments of another kind than Exact and the loaders take: as a first try of a new user gives them."""

    data = TensorDataset(torch.zeros(16, 4), torch.zeros(16, 1))
    model = torch.nn.Linear(4, 1)

    def exact(self, folder, loader=None, **arguments):
        loader = loader or torch_loader(DataLoader(self.data, 4), "cpu")
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        return Exact(folder, loader, **{"model": self.model, "optimizer": optimizer, **arguments})


@pytest.mark.parametrize(
    ("said", "make"),
    [
        ("DataLoader .*torch_loader", lambda kinds, out: kinds.exact(out, DataLoader(kinds.data, 4))),
        ("model=list", lambda kinds, out: kinds.exact(out, model=[kinds.model])),
        ("optimizer list", lambda kinds, out: kinds.exact(out, optimizer=[]).resume()),
        ("keep=0", lambda kinds, out: kinds.exact(out, keep=0)),
        ("save_every=1epoch", lambda kinds, out: kinds.exact(out, save_every="1epoch")),
        ("save_every=2.5", lambda kinds, out: kinds.exact(out, save_every=2.5)),
        ("plugins=.*Plugin", lambda kinds, out: kinds.exact(out, plugins=[Plugin])),
        ("plugins=.*Plugin", lambda kinds, out: kinds.exact(out, plugins=Plugin())),
        ("got TensorDataset", lambda kinds, _: torch_loader(kinds.data, "cpu")),
        ("DataLoader .*its dataset", lambda kinds, _: map_style_loader(DataLoader(kinds.data, 4), 4, "cpu")),
        ("BatchSampler .*got int", lambda kinds, _: map_style_loader(kinds.data, 4, "cpu")),
    ],
)
def test_an_argument_of_another_kind_is_refused_with_what_is_expected(said, make, tmp_path):
    with pytest.raises(BadInput, match=said):
        make(OtherKinds(), tmp_path)


def test_a_step_before_resume_is_named(tmp_path):
    loop = Loop(tmp_path)
    loop.step(*next(iter(loop.loader)))
    with pytest.raises(BadInput, match=r"resume\(\) before "):
        loop.run.end_step()


def test_a_save_that_the_loop_leaves_out_is_named_once(tmp_path):
    loop = Loop(tmp_path)
    train(loop, saves=False)
    assert sum(names(line, "step 3", "save()", "not called") for line in loop.lines) == 1


def test_steps_without_end_step_are_not_saved(tmp_path):
    loop = Loop(tmp_path)
    train(loop, ends=False)
    assert sum(names(line, "step 8", "not saved", "end_step()", "0 times") for line in loop.lines) == 1
    assert files.list_newest_first(str(tmp_path / "checkpoints")) == []


def test_two_runs_at_a_time_in_a_process_are_refused(tmp_path):
    first = Loop(tmp_path / "first")
    first.run.resume()
    second = Loop(tmp_path / "second")
    second.run.resume()
    first.step(*next(iter(first.loader)))
    with pytest.raises(BadInput, match=r"another Exact .*one run"):
        first.run.end_step()


def test_a_schedule_that_no_checkpoint_holds_is_named(tmp_path):
    loop = Loop(tmp_path, has_schedule=True)
    loop.run.resume()
    assert sum(names(line, "schedule", "learning rate", "no checkpoint") for line in loop.lines) == 1
    loop = Loop(tmp_path / "other")
    loop.run.resume()
    assert loop.count("schedule") == 0


def test_a_run_that_writes_nothing_leaves_the_results_of_another_one_as_they_are(tmp_path):
    train(Loop(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "checkpoints" / "step_8.pt").unlink()  # it continues from step 6
    loop = Loop(tmp_path, writes=False)
    train(loop)
    assert loop.count("resumed from")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == {path: content for path, content in before.items() if path.name != "step_8.pt"}


@pytest.mark.parametrize("value", [Path("data"), signal.SIGTERM])
def test_an_identity_that_could_not_be_read_back_is_refused_before_the_first_step(value, tmp_path):
    loop = Loop(tmp_path, identity={"kept": 1, "data": value})
    with pytest.raises(BadInput, match=rf"cannot hold identity\.data, a {type(value).__name__}"):
        loop.run.resume()


def test_an_object_with_the_name_of_a_part_is_refused(tmp_path):
    """Its state would take the place of that part, or be left out."""
    loop = Loop(tmp_path)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer)
    for name in ("scheduler", "receipt", "model"):
        with pytest.raises(BadInput, match=rf"add\({name}=\.\.\.\)"):
            loop.run.add(**{name: schedule})
    loop.run.add(plateau=schedule)
    loop.run.add(plateau=schedule)
    assert loop.run.state.objects["plateau"] is schedule


class Error(Exception):
    """Ends a loop, and not its process, as in a notebook."""


def fail_at_5(loop):
    loop.optimizer.zero_grad()
    if loop.loader.step == 5:
        loop.step(torch.ones(4, 4), torch.zeros(4, 1), takes=False)
        raise Error


def test_a_loop_that_runs_again_in_its_process_continues_exactly(tmp_path, monkeypatch):
    """Its gradients are not those of the batch with which it has failed, and the last write has ended."""
    whole = Loop(tmp_path / "whole")
    train(whole)
    loop = Loop(tmp_path / "again")
    write = loop.run.saver._write_checkpoint
    monkeypatch.setattr(
        loop.run.saver, "_write_checkpoint", lambda *arguments: time.sleep(0.5) or write(*arguments)
    )
    with pytest.raises(Error):
        train(loop, after=fail_at_5)
    loop.is_clean = False
    train(loop, after=lambda loop: loop.optimizer.zero_grad())
    assert loop.count("resumed from") == 1
    assert torch.equal(loop.model.weight, whole.model.weight)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_schedule_that_is_ahead_of_the_checkpoint_is_refused(is_new, tmp_path):
    """It cannot go back: the rates of the next steps would be those of later ones."""
    loop = Loop(tmp_path, schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    schedule = loop.run.state.schedule.scheduler

    def step(loop):
        schedule.step()
        fail_at_5(loop)

    with pytest.raises(Error):
        train(loop, after=step)
    run = loop.run
    if is_new:
        loader = torch_loader(DataLoader(loop.loader.engine.data_set, 4), torch.device("cpu"), epochs=2)
        run = Exact(tmp_path, loader, model=loop.model, optimizer=loop.optimizer, scheduler=schedule)
    with pytest.raises(BadInput, match=r"StepLR .* 2 times.* 5 times"):
        run.resume()


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("adjacency", torch.eye(4).to_sparse())


class Unmeasured(torch.nn.Linear):
    def __len__(self):  # as that of a module that torch.compile() has wrapped
        raise TypeError


def test_a_model_may_have_no_truth_value(tmp_path):
    assert Loop(tmp_path, model=Unmeasured(4, 1)).run.resume() == 0


@pytest.mark.parametrize("name", ["save_every", "report_every"])
@pytest.mark.parametrize("every", [-1, Interval(3, "steps")])
def test_an_interval_that_is_none_is_refused(name, every, tmp_path):
    with pytest.raises(BadInput, match=f"{name}=-1|{name}=3steps"):
        Loop(tmp_path, **{name: every})


def test_a_folder_may_be_a_path_and_a_report_may_be_due_after_some_steps(tmp_path):
    loop = Loop(Path(tmp_path / "out"), report_every=2)
    reports = []
    for _ in loop.loader.epochs_from(loop.run.resume()):
        for batch in loop.loader:
            loop.step(*batch)
            due = loop.run.end_step()
            if due.report:
                reports.append(loop.loader.step)
            if due.save:
                loop.run.save()
    loop.run.close()
    assert reports == [2, 3, 4, 6, 8]
    assert (tmp_path / "out" / "checkpoints" / "step_8.pt").exists()


@pytest.mark.parametrize("distance", [-1, Interval(300, "s")])
def test_a_distance_of_old_checkpoints_that_is_none_is_refused(distance, tmp_path):
    with pytest.raises(BadInput, match=f"keep_every={distance}: expected"):
        Loop(tmp_path, keep_every=distance)


def test_a_model_of_fsdp_1_is_refused_at_once(tmp_path):
    """Its state is a collective of all ranks: rank 0 alone would wait for ever."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(torch.nn.Linear(4, 1), device_id=torch.device("cpu"))
        for models in ({"model": wrapped}, {"model": wrapped.module, "forward": wrapped}):
            with pytest.raises(BadInput, match=r"FullyShardedDataParallel: .*fully_shard\(\)"):
                Loop(tmp_path, **models)
    finally:
        torch.distributed.destroy_process_group()


def test_a_sparse_buffer_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"model\.adjacency is a sparse tensor"):
        Loop(tmp_path, model=Graph()).run.resume()


def test_a_loop_in_another_thread_is_trained_and_told_what_a_signal_does(tmp_path, capsys, monkeypatch):
    """A service, or a framework that trains in a thread of its own."""
    monkeypatch.setattr(signals, "_watching", threading.Event())  # no loop of these tests was there before
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(train, Loop(tmp_path)).result()
    assert capsys.readouterr().out.count("not in the main thread") == 1
    assert Loop(tmp_path).run.resume() == 8


def test_a_model_whose_shapes_are_not_known_yet_is_named(tmp_path):
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(3, 1))
    with pytest.raises(BadInput, match=r"model\.0\.weight has no shape"):
        Loop(tmp_path, model=model).run.resume()


def test_a_loop_that_changes_the_working_directory_saves_where_it_began(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    loop = Loop("out")
    monkeypatch.chdir(tmp_path / "other")
    train(loop)
    assert len(files.list_newest_first(str(tmp_path / "out/checkpoints"))) == 3
    monkeypatch.chdir(tmp_path)
    assert Loop("out").run.resume() == 8


def swap_and_restore(loop):
    """As an evaluation with averaged weights."""
    kept = loop.model.weight.detach().clone()
    with torch.no_grad():
        loop.model.weight.zero_()
        loop.model.weight.copy_(kept)


def evaluate_and_restore(loop):
    """The same, and a loader of this package reads while the other weights are there."""
    kept = loop.model.weight.detach().clone()
    with torch.no_grad():
        loop.model.weight.zero_()
        data = TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
        for inputs, _ in map_style_loader(data, SequentialBatchSampler(8, 4), torch.device("cpu")):
            loop.model(inputs)
        loop.model.weight.copy_(kept)


def clip(loop):
    with torch.no_grad():
        loop.model.weight.clamp_(-0.01, 0.01)


def clip_data(loop):
    """It moves no version counter of torch."""
    loop.model.weight.data.clamp_(-0.01, 0.01)


CHANGES = [
    ("the scheduler", lambda loop: loop.run.state.objects["scheduler"].step()),
    ("model.weight", clip),
    ("model.weight", clip_data),
    ("", swap_and_restore),
    ("", evaluate_and_restore),
]


@pytest.mark.parametrize(("changed", "change"), CHANGES)
def test_what_is_changed_after_a_save_is_named_once(changed, change, tmp_path):
    loop = Loop(tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 100)
    loop.run = Exact(
        str(tmp_path), loop.loader, model=loop.model, optimizer=loop.optimizer, scheduler=scheduler,
        job=Job(say=loop.lines.append), save_every=2,
    )  # fmt: skip
    for _ in loop.loader.epochs_from(loop.run.resume()):
        for batch in loop.loader:
            loop.step(*batch)
            if loop.run.end_step().save:
                loop.run.save()
            change(loop)
        scheduler.step()  # the code after an epoch is not a part of its last step
    loop.run.close()
    assert loop.count("after run.save()") == bool(changed)
    named = [line for line in loop.lines if names(line, "changed", changed, "run.save()", "step 2")]
    assert len(named) == bool(changed)


def test_what_follows_a_run_is_not_a_change_of_it(tmp_path):
    """The second phase of a script begins with the model of the first, and a new head."""
    first = Loop(tmp_path / "first")
    first.run.resume()
    for batch in first.loader:
        first.step(*batch)
        if first.run.end_step().save:
            first.run.save()
            break
    first.run.close()
    with torch.no_grad():
        first.model.weight.zero_()
    torch.optim.Adam(first.model.parameters()).step()
    second = Loop(tmp_path / "second")
    train(second)
    assert not first.count("takes steps")
    assert not first.count("has changed") and not second.count("has changed")


class Seconds(torch.nn.Linear):
    """Its extra state changes by itself."""

    def get_extra_state(self):
        return {"seconds": time.monotonic()}

    def set_extra_state(self, state):
        pass


def test_a_state_that_changes_by_itself_is_not_named(tmp_path):
    loop = Loop(tmp_path, model=Seconds(4, 1))
    train(loop)
    assert not loop.count("has changed")


class Gathered(torch.nn.Linear):
    """Its extra state exists only while the loop gathers it."""

    is_gathered = True

    def get_extra_state(self):
        if not self.is_gathered:
            raise RuntimeError("gather first")
        return {}

    def set_extra_state(self, state):
        pass


def test_a_state_that_exists_only_around_a_save_does_not_end_the_training(tmp_path):
    loop = Loop(tmp_path, model=Gathered(4, 1))
    gather = functools.partial(setattr, loop.model, "is_gathered")
    train(loop, before=lambda _: gather(True), after=lambda _: gather(loop.loader.step == 8))
    assert loop.loader.step == 8 and not loop.count("has changed")


def test_a_refusal_names_no_option_of_the_jobs(tmp_path):
    train(Loop(tmp_path, identity={"width": 1}))
    with pytest.raises(BadInput, match=r"\bwidth [^;]*\b1\b[^;]*\b2\b.*another output folder\)$"):
        train(Loop(tmp_path, identity={"width": 2}))


def test_an_output_folder_that_is_a_dangling_link_is_named(tmp_path):
    (tmp_path / "out").symlink_to("unmounted/runs")
    with pytest.raises(BadInput, match=r"out .*link to unmounted/runs, .*not exist"):
        train(Loop(tmp_path / "out"))


@pytest.mark.parametrize("begin", [torch.zeros(3), None])
def test_a_buffer_that_is_not_persistent_any_more_is_refused_before_a_load(begin, tmp_path):
    train(Loop(tmp_path, model=Queue(torch.zeros(0))))
    model = Queue(begin)
    model.register_buffer("seen", begin, persistent=False)
    before = model.linear.weight.clone()
    with pytest.raises(BadInput, match=r"\bseen [^;]*\[8\][^;]*missing"):
        Loop(tmp_path, model=model).run.resume()
    assert torch.equal(model.linear.weight, before)


class Queue(torch.nn.Module):
    """Its buffer grows in the training. begin: before the first step."""

    def __init__(self, begin):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("seen", begin)

    def forward(self, inputs):
        mean = inputs.mean()[None]
        self.seen = mean if self.seen is None else torch.cat([self.seen, mean])
        return self.linear(inputs)


@pytest.mark.parametrize(("begin", "shape"), [(torch.zeros(0), "[0]"), (None, "missing")])
def test_a_buffer_that_has_grown_is_continued(begin, shape, tmp_path):
    loop = Loop(tmp_path, model=Queue(begin))
    train(loop)
    restarted = Loop(tmp_path, model=Queue(begin))
    assert restarted.run.resume() == 8
    assert torch.equal(restarted.model.seen, loop.model.seen)
    pattern = rf"\bseen .*\[8\] .*checkpoint.* {re.escape(shape)}"
    assert sum(bool(re.search(pattern, line)) for line in restarted.lines) == 1


def test_a_damaged_checkpoint_is_passed_over_if_the_output_cannot_show_its_path(tmp_path, monkeypatch):
    """As with PYTHONIOENCODING=ascii, or a locale of one language only."""
    folder = tmp_path / "数据"
    train(Loop(folder))
    newest = files.list_newest_first(str(folder / "checkpoints"))[0]
    with open(newest, "r+b") as file:
        file.write(b"damaged")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert Loop(folder).run.resume() == 6


class Metric(torch.nn.Module):
    """Its state is in no state_dict(), as that of torchmetrics."""


class LossScaler(Metric):
    """One that is disabled has no state, as torch's GradScaler."""


def test_an_object_without_a_state_is_named(tmp_path):
    loop = Loop(tmp_path, metric=Metric(), scaler=LossScaler())
    loop.run.resume()
    assert sum(names(line, "state_dict()", "metric", "empty") for line in loop.lines) == 1
    assert loop.count("scaler") == 0


class Seen:
    def __init__(self):
        self.keys = set()
        self.bytes = bytearray()

    def state_dict(self):
        return {"keys": self.keys, "bytes": self.bytes}

    def load_state_dict(self, state):
        self.keys = set(state["keys"])


def test_a_set_is_saved_as_it_was_at_the_save(tmp_path, monkeypatch):
    """The thread that writes is behind the loop."""
    seen = Seen()
    try:
        files.check_readable({"objects": {"seen": seen.state_dict()}})
    except ValueError as error:
        pytest.skip(f"this torch refuses it before the first step: {error}")
    loop = Loop(tmp_path, seen=seen)
    saver = loop.run.saver
    submit = saver._writer._pool.submit
    writes, states = [], []
    monkeypatch.setattr(saver._writer._pool, "submit", lambda write: writes.append(write) or submit(int))
    monkeypatch.setattr(saver, "_write_checkpoint", lambda state, *_: states.append(state))
    for _ in loop.loader.epochs_from(loop.run.resume()):
        for batch in loop.loader:
            loop.step(*batch)
            seen.keys.add(loop.loader.step)
            seen.bytes.append(loop.loader.step)
            if loop.run.end_step().save:
                loop.run.save()
    writes[0]()
    assert states[0]["objects"]["seen"] == {"keys": {1, 2, 3}, "bytes": bytearray([1, 2, 3])}
    loop.run.give_up()
