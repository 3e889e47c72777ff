"""Run a job on CUDA tensors without memory, and record waits of the host, and the order of operations.

FakeTensorMode gives tensors that only have a device and a shape. A dispatch mode above it sees
every operation. Streams and events are stand-ins with vector clocks (L. Lamport, "Time, clocks, and the
ordering of events in a distributed system", 1978): two operations on one storage, one of which writes, must
be ordered by a stream, an event or the host. Autograd cannot run on such tensors: backward() only makes
gradients.
"""

import collections
import contextlib
import functools
import importlib.util
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bootfile.exact import replicas  # noqa: F401 - it must know the real DistributedDataParallel
from bootfile.exact.loop import Due
from bootfile.ground import accelerator
from bootfile.processes import ranks
from common.checkpoint.checkpointer import Checkpointer
from common.compute import classifiers, models
from common.distributed import barrier, devices, process_group
from common.ground import endings
from common.parallel import batchnorm
from common.run import environment, log, output
from common.run.run import Run
from datasets.loaders import image_folders
from datasets.loaders.engines import memory
from tests.conftest import ROOT

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
_WAITS = {  # their result, or its size, is on the device
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten.bincount,
    aten._unique2, aten.unique_dim, aten.unique_consecutive,
}  # fmt: skip
_MASKS = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # nonzero() of a boolean mask
_NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.detach, aten.lift_fresh, aten.alias}
Clock = collections.Counter  # of a stream or the host: the progress of each stream that it knows of


class Stream:
    """A stand-in for torch.cuda.Stream."""

    current: "Stream"
    order: "Recorder"

    def __init__(self, *_, **__):
        self.clock = Clock()

    def wait_event(self, event):
        self.clock |= event.clock

    def wait_stream(self, stream):
        self.clock |= stream.clock

    def synchronize(self):
        Stream.order.host |= self.clock
        Stream.order.wait("synchronize() of a stream")


class Event:
    """A stand-in for torch.cuda.Event. blocking: whether a host that waits for it sleeps."""

    def __init__(self, *_, blocking=False, **__):
        self.blocking, self.clock, self.step = blocking, Clock(), -1

    def record(self, stream=None):
        self.clock, self.step = Clock((stream or Stream.current).clock), Stream.order.steps

    def wait(self, stream=None):
        (stream or Stream.current).wait_event(self)

    def query(self):
        return self.step < Stream.order.steps

    def elapsed_time(self, end):
        return float(end.step - self.step)

    def synchronize(self):
        assert self.blocking, f"the host spins and does not sleep: {_where()}"
        Stream.order.host |= self.clock
        if self.step == Stream.order.steps and self.clock[Stream.order.main]:
            Stream.order.wait("synchronize() of an event of this step")


class Generator:
    """A stand-in for the generator of a GPU: torch's changes a number on the host."""

    def __init__(self, recorder):
        self.recorder = recorder

    def manual_seed(self, seed):
        self.recorder.seeds.append((self.recorder.steps, seed))


class Recorder(TorchDispatchMode):
    """Records operations on CUDA tensors.

    steps: number of finished steps.
    seeds: the seeds of the GPU's generator, each with the number of the step.
    waits: operations for which the host waits, with step and source line. races: storages that two streams
    use without order. layouts: whether the weights of convolutions are channels_last. losses: the types of
    the logarithms in cross entropies. collectives: the number in each step. blocks: tensors of pinned memory.
    """

    def __init__(self):
        super().__init__()
        self.main = Stream()
        self.host, self.steps = Clock(), 0
        self.waits, self.races, self.seeds, self._unrecorded = [], [], [], []
        self.pinned: set[int] = set()
        self.layouts, self.losses = set[bool](), set[torch.dtype]()
        self.collectives, self.blocks, self.launches = Clock(), [], []
        self._written: dict[int, tuple[Stream, int]] = {}
        self._read: dict[int, Clock] = collections.defaultdict(Clock)
        self._owner: dict[int, Stream] = {}  # the stream in whose pool a storage is
        self._users: dict[int, set[Stream]] = collections.defaultdict(set)  # record_stream()
        self._storages = {}  # their weak references: no storage gets the number of an earlier one

    def end_step(self):
        self.steps += 1
        freed = [text for storage, text in self._unrecorded if self._storages[storage].expired()]
        self.races += freed  # their pool may reuse that memory while another stream uses it

    def wait(self, what):
        self.waits.append((self.steps, f"{what}: {_where()}"))

    def number(self, tensor):
        """Return the number of a tensor's storage."""
        reference = StorageWeakRef(tensor.untyped_storage())
        return self._storages.setdefault(reference.cdata, reference).cdata

    def record_stream(self, tensor, stream):
        self._users[self.number(tensor)].add(stream)

    def write_on_host(self, tensor):
        """Note that the host fills memory: nothing on the device may still use it."""
        storage = self.number(tensor)
        self._check(storage, self.host, "the host writes to memory that the device may still use")
        self._written.pop(storage, None)
        self._read.pop(storage, None)

    def read_on_host(self, tensor):
        """Note that the host reads what the device has written."""
        self._check_written(self.number(tensor), self.host, "the host reads what may not be written yet")

    def _check_written(self, storage, clock, text):
        stream, time = self._written.get(storage, (None, 0))
        if clock[stream] < time:
            self.races.append(f"{text}: {_where()}")

    def _check(self, storage, clock, text):
        self._check_written(storage, clock, text)
        if any(clock[stream] < time for stream, time in self._read[storage].items()):
            self.races.append(f"{text}: {_where()}")

    def _launch(self, func, args, kwargs, outputs):
        stream = Stream.current
        self.launches.append(func)
        stream.clock |= self.host  # the host launches it after the work that it has waited for
        stream.clock[stream] += 1
        places = [*zip(func._schema.arguments, args, strict=False)]
        places += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        for argument, value in places:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._use(tensor, stream, is_write)
        for tensor in outputs:
            self._use(tensor, stream, is_write=True)

    def _use(self, tensor, stream, is_write):
        storage = self.number(tensor)
        owner = self._owner.setdefault(storage, stream)
        if tensor.is_cuda and stream not in (owner, *self._users[storage]):
            self._unrecorded.append((storage, f"memory that is freed without record_stream(): {_where()}"))
        if not is_write:
            self._check_written(storage, stream.clock, "a stream reads what may not be written yet")
            self._read[storage][stream] = stream.clock[stream]
            return
        self._check(storage, stream.clock, "a stream writes to what another one may still use")
        self._written[storage] = stream, stream.clock[stream]

    def _find_size(self, func, args, tensors):
        """Return whether the host must learn from the device how large the result is, or what it is."""
        if not any(each.is_cuda for each in tensors):
            return False
        if func.overloadpacket in _MASKS:
            return any(each.dtype == torch.bool for each in tree_leaves(args[1]) if each is not None)
        return func.overloadpacket in _WAITS

    def _find_copy(self, func, args, kwargs, tensors, outputs):
        """Return why the host waits for a copy between host and device; None if it does not."""
        is_across = len({each.is_cuda for each in (*tensors, *outputs)}) == 2
        if func.overloadpacket not in (aten._to_copy, aten.copy_) or not is_across:
            return None
        if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
            return "a copy between host and device that is not non_blocking"
        source = tensors[-1]
        if not source.is_cuda and self.number(source) not in self.pinned:
            return "a copy from memory that is not pinned"
        return None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "aten":
            self.collectives[self.steps] += func.namespace == "c10d"
            return func(*args, **kwargs)
        if func is aten.convolution.default and args[1].is_cuda:
            self.layouts.add(args[1].is_contiguous(memory_format=torch.channels_last))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func is aten._local_scalar_dense.default:
            if tensors[0].is_cuda:
                self.wait("item()")
                self.host |= Stream.current.clock
            else:
                self.read_on_host(tensors[0])
            return False if tensors[0].dtype == torch.bool else 0
        if self._find_size(func, args, tensors):
            self.wait(func.overloadpacket.__name__)
        is_fused = func.overloadpacket.__name__.startswith(
            "_fused_"
        )  # it works in place and has no fake version
        result = None if is_fused else func(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if func is aten.nll_loss_forward.default:
            self.losses.add(args[0].dtype)
        if kwargs.get("pin_memory"):
            self.pinned.add(self.number(result))
            self.blocks.append(result)
        if not any(each.is_cuda for each in (*tensors, *outputs)):
            return result
        if not func.is_view and func.overloadpacket not in _NO_KERNEL:
            self._launch(func, args, kwargs, outputs)
        if reason := self._find_copy(func, args, kwargs, tensors, outputs):
            self.wait(reason)
            self.host |= Stream.current.clock
        return result


def _where():
    """Return the current line of the project, outside of this file."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.lineno} in {frame.name}: {frame.line}"
    return "?"


@contextlib.contextmanager
def fake_gpu(monkeypatch, capability=(9, 0)):
    """Give this process a GPU without memory or kernels. Yields the Recorder."""
    recorder = Recorder()
    Stream.order, Stream.current = recorder, recorder.main

    @contextlib.contextmanager
    def stream(which):
        before, Stream.current = Stream.current, which
        yield
        Stream.current = before

    for name, value in {
        "Stream": Stream, "Event": Event, "stream": stream, "current_stream": lambda *_: Stream.current,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda *_: None,
        "synchronize": lambda *_: recorder.wait("synchronize()"),
        "default_generators": (Generator(recorder),),
        "get_device_capability": lambda *_: capability, "is_bf16_supported": lambda *_, **__: True,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(accelerator, "in_use", lambda: torch.cuda)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)

    def pin_memory(tensor):
        if tensor.is_cuda:
            raise RuntimeError(f"cannot pin {tensor.type()} only dense CPU tensors can be pinned")
        copy = tensor.clone()
        recorder.pinned.add(recorder.number(copy))
        return copy

    pinned: list[np.ndarray] = []
    real_from_numpy, real_numpy = torch.from_numpy, on_host(torch.Tensor.numpy)

    def from_numpy(array):
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return real_from_numpy(array)
        return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))

    def numpy(tensor):
        if not isinstance(tensor, FakeTensor):
            return real_numpy(tensor)
        assert not tensor.is_cuda
        recorder.read_on_host(tensor)
        array = np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if recorder.number(tensor) in recorder.pinned:
            pinned.append(array)
        return array

    def frombuffer(array, dtype, count):
        tensor = torch.empty(count, dtype=dtype)
        if any(array is each or array.base is each for each in pinned):
            recorder.pinned.add(recorder.number(tensor))
        return tensor

    tensor = torch.Tensor
    monkeypatch.setattr(tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(tensor, "is_pinned", lambda tensor: recorder.number(tensor) in recorder.pinned)
    monkeypatch.setattr(tensor, "record_stream", lambda *each: recorder.record_stream(*each))
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    monkeypatch.setattr(torch, "frombuffer", frombuffer)
    monkeypatch.setattr(tensor, "numpy", numpy)
    monkeypatch.setattr(torch.nn.Module, "to", _move)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        yield recorder


def _move(module, device=None, memory_format=None):
    """Module.to(), with new parameters: torch cannot exchange fake ones."""
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                new = torch.empty_strided(
                    old.size(), old.stride(), dtype=old.dtype, device=device or old.device
                )
                if memory_format and new.ndim == 4:
                    new = new.contiguous(memory_format=memory_format)
                if isinstance(old, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, old.requires_grad)
                tensors[name] = new
    return module


def on_host(function):
    """Return the function without fake tensors: it computes on the CPU."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return wrapped


class _Ended(Exception):
    pass


class Wrapper(torch.nn.Module):
    """A stand-in for DistributedDataParallel. made: the keyword arguments of each."""

    made: list[dict]

    def __init__(self, module, **arguments):
        super().__init__()
        self.module = module
        self.made.append(arguments)

    def forward(self, *inputs):
        return self.module(*inputs)

    def no_sync(self):
        return contextlib.nullcontext()


def _fake_group(monkeypatch, module):
    """Connect this process to a second one that does not exist: collectives do nothing."""
    Wrapper.made = []
    from torch.testing._internal.distributed import fake_pg

    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    for place, name, value in (
        (ranks, "gather_objects", lambda value: [value, value]),
        (ranks, "broadcast_object", lambda value: value), (barrier, "wait_for_all", lambda *_: None),
        (Run, "join", lambda _: (0, 2)), (process_group, "meet", lambda *_: {}),
        (torch.distributed, "init_process_group", lambda: None), (devices, "select", lambda *_: DEVICE),
        (batchnorm, "convert_sync_batchnorm", lambda model: model),
        (torch.nn.parallel, "DistributedDataParallel", Wrapper),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    if hasattr(module, "DistributedDataParallel"):
        monkeypatch.setattr(module, "DistributedDataParallel", Wrapper)


def run_steps(monkeypatch, tmp_path, job, *arguments, steps=3, capability=(9, 0), world_size=1):
    """Run main() of a job for some steps on a GPU without kernels. Return the Recorder.

    A step ends when backward() begins. Data sets and models are made on the CPU. The job writes nothing.
    world_size: 2 adds a rank that does not exist; with 1 there is no process group.
    """
    path = os.path.join(ROOT, "jobs", job)
    spec = importlib.util.spec_from_file_location(f"fake_{job[:-3]}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    common = ["--resume=never", "--output_dir", str(tmp_path), "--report_every=1000000"]
    monkeypatch.setattr(sys, "argv", [path, *arguments, *common])
    for place in (output, log, environment):
        monkeypatch.setattr(place, "writes_nothing", lambda _: True)
    monkeypatch.setattr(endings, "_at_end", {place: [] for place in endings.PLACES})
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # jobs set it
    for place, name in (
        (memory.Windows, "__init__"), (memory.Windows, "__call__"), (models, "resnet18"),
        (classifiers, "build"), (image_folders, "open_indexes"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, on_host(getattr(place, name)))
    monkeypatch.setattr(Run, "join", lambda _: (0, 1))
    if hasattr(module, "image_set"):
        load = module.image_set.load

        @on_host
        def load_real(*args):
            found = load(*args)
            for each in found:
                assert each.fingerprint
                object.__setattr__(each, "images", each.images.clone())  # in torch's own memory
            return found

        monkeypatch.setattr(module.image_set, "load", load_real)
    if world_size > 1:
        _fake_group(monkeypatch, module)
    trained, ended = [], []
    resume = Checkpointer.resume

    def resume_and_keep(self):
        trained.append(self.model)
        ended.append(lambda: self.end(SystemExit()))
        recorder.loader = self.loader
        return resume(self)

    monkeypatch.setattr(Checkpointer, "resume", resume_and_keep)
    with fake_gpu(monkeypatch, capability) as recorder:

        def backward(*_):
            recorder.end_step()
            if recorder.steps == steps:
                raise _Ended
            for parameter in trained[0].parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        end_step = Checkpointer.end_step

        def only_reports(self):
            return Due(end_step(self).report and reports, False)

        reports = any(word.startswith("--prof") for word in arguments)  # other reports read figures
        monkeypatch.setattr(Checkpointer, "end_step", only_reports)
        with contextlib.suppress(_Ended):
            try:
                module.main.__wrapped__()
            finally:
                ended[0]()  # the job has ended within a step
                if world_size > 1:
                    torch.distributed.destroy_process_group()
    return recorder
