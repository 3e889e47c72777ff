"""A device for torch that is written in Python: "toy". Its tensors lie in host memory, and the CPU computes.

torch treats it as the device of any other vendor: autograd, modules and optimizers run as on a GPU. It has no
streams, events, pinned memory and float64. So it finds lines of a job that are written for CUDA. The group
of processes "toyccl" sends its tensors with gloo. It uses
torch.utils.backend_registration._setup_privateuseone_for_python_backend, of torch 2.14.

    from tests.support import python_device; python_device.register("GPU-0")
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils import backend_registration
from torch.utils._pytree import tree_map, tree_map_only

NAME = "toy"
setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
aten = torch.ops.aten
_CPU = torch._C.DispatchKey.CPU  # its kernels of views only change sizes and strides, on any device
_DEVICE = torch.device("privateuseone", 0)
_libraries = []  # they live as long as the process


def _new(host):
    """Return a tensor of the device on the memory of a CPU tensor."""
    return _put(torch._C._acc.create_empty_tensor([0], host.dtype), host)


def _put(tensor, host):
    """Give a tensor of the device the memory, shape and strides of a CPU tensor."""
    if host.dtype == torch.float64 and NAME == "toy":
        raise TypeError(f"{NAME} has no float64")
    memory = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), _DEVICE, memory.nbytes())
    storage.host = memory  # as long as a tensor of the device uses it
    place = (host.storage_offset(), host.shape, host.stride())
    return aten.set_.source_Storage_storage_offset._op_dk(_CPU, tensor, storage, *place)


def _view(tensor, size, stride, offset=None):
    """as_strided() of a tensor of the device."""
    return aten.as_strided.default._op_dk(_CPU, tensor, list(size), list(stride), offset)


def _host(tensor):
    """Return a CPU tensor on the memory of a tensor. The memory belongs to the storage, because autograd
    saves other tensors of the same storage."""
    if tensor.device.type != NAME:
        return tensor
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(tensor.untyped_storage().host, tensor.storage_offset(), tensor.shape, tensor.stride())


def _compute(op, *args, **kwargs):
    """Compute an operation on the CPU. A result in the memory of an argument becomes a view of it."""
    owners = {}

    def to_host(tensor):
        host = _host(tensor)
        if host is not tensor:
            owners.setdefault(host.untyped_storage().data_ptr(), tensor)
            hosts.append((tensor, host))
        return host

    hosts: list = []
    makes = isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == NAME
    if makes:
        kwargs = kwargs | {"device": torch.device("cpu"), "pin_memory": False}
    args, kwargs = tree_map_only(torch.Tensor, to_host, (args, kwargs))
    result = op(*args, **kwargs)
    for tensor, host in hosts:
        if tensor.shape != host.shape:  # a result that was empty
            _put(tensor, host)

    def to_device(value):
        if not isinstance(value, torch.Tensor) or not (owners or makes):
            return value
        for tensor, host in hosts:
            if value is host:
                return tensor
        owner = owners.get(value.untyped_storage().data_ptr()) if value.numel() else None
        if owner is not None and owner.dtype == value.dtype:
            return _view(owner, value.shape, value.stride(), value.storage_offset())
        return _new(value)

    return tree_map(to_device, result)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _new(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return _new(torch.empty_strided(size, stride, dtype=dtype))


def _copy_(target, source, non_blocking=False):
    _host(target).copy_(_host(source))
    return target


def _in_half(op, *args):
    """Compute an operation under autocast."""
    with torch.autocast(_DEVICE.type, enabled=False):
        return op(*tree_map_only(torch.Tensor, torch.Tensor.bfloat16, args))


class _Group(dist.ProcessGroup):
    """A group of processes that sends tensors of the device with gloo."""

    def __init__(self, store, rank, world_size, timeout):
        super().__init__(rank, world_size)
        self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def _send(self, name, *args):
        hosts = tree_map_only(torch.Tensor, _host, args)
        getattr(self._gloo, name)(*hosts).wait()
        future = torch.futures.Future()
        future.set_result(args[0] if args else None)
        return _create_work_from_future(future)

    allreduce = functools.partialmethod(_send, "allreduce")
    allgather = functools.partialmethod(_send, "allgather")
    broadcast = functools.partialmethod(_send, "broadcast")
    barrier = functools.partialmethod(_send, "barrier")

    pg_name = group_name = "default"


def register(uuid, name="toy", backend="toyccl"):
    """Make this the accelerator of the process. uuid: of the one device that it sees. name: of its type; all
    but "toy" have float64. backend: of its groups of processes."""
    global NAME
    NAME = name
    module = SimpleNamespace(
        is_initialized=lambda: True, is_available=lambda: True, _is_in_bad_fork=lambda: False,
        device_count=lambda: 1, current_device=lambda: 0, set_device=lambda device: None,
        manual_seed_all=lambda seed: None, manual_seed=lambda seed: None,
        get_device_properties=lambda index: SimpleNamespace(uuid=uuid),
        synchronize=lambda: None, get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )  # fmt: skip
    setup(NAME, module)
    special = {
        "empty.memory_format": _empty, "empty_strided": _empty_strided, "copy_": _copy_, "as_strided": _view,
        "view": lambda tensor, size: aten.view.default._op_dk(_CPU, tensor, size),
    }  # fmt: skip
    ours = torch.library.Library("aten", "IMPL")
    for each, kernel in special.items():
        ours.impl(each, kernel, "PrivateUse1")
    # A structured operation has a kernel for all devices, which needs more of a device than a fallback.
    key = "CompositeExplicitAutogradNonFunctional"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = [each.removeprefix("aten::") for each in names]
    others = ("arange", "arange.start", "arange.start_step", "convolution", "convolution_backward")
    for each in {*names, *others} - special.keys():
        if "::" in each:
            continue
        packet, _, overload = each.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        ours.impl(each, lambda *args, op=op, **kwargs: _compute(op, *args, **kwargs), "PrivateUse1")
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(_compute, "PrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for op in (aten.conv2d.default, aten.linear.default, aten.matmul.default):
        ours.impl(op, functools.partial(_in_half, op), "AutocastPrivateUse1")
    _libraries.extend([ours, rest])
    create = lambda store, rank, size, timeout: _Group(store, rank, size, timeout)  # noqa: E731
    dist.Backend.register_backend(backend, create, devices=[NAME])
