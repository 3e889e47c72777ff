"""The sharded tensors of a checkpoint, in a folder that torch.distributed.checkpoint writes and reads.

    FOLDER/step_400.pt         the state (files.py); a sharded tensor in it is on the meta device
    FOLDER/step_400.pt.json    also the files of step_400.shards: "shards": {name: [size in bytes, sha256]}
    FOLDER/step_400.shards/    __<rank>_0.distcp with the tensors of each rank, and .metadata

All ranks must see the same FOLDER. A checkpoint can be read by any number of ranks. Experimental.
"""

import os
import pickle
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bootfile.exact import digest, distributed_states, dtensors
from bootfile.ground.files import opener, sha256_file
from bootfile.ground.results import dtensor_folder
from bootfile.processes import ranks

# what the pickle in .metadata may name
_SAFE = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
}  # fmt: skip


def save(path: str, objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Write the sharded tensors of a checkpoint's objects. Call it on every rank. Return the objects with
    meta tensors in their places, and the files: name -> [size in bytes, sha256]. Raises RuntimeError."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    folder = dtensor_folder(path)
    # every rank has the same names: torch divides the writes between the ranks by them
    tensors = {name: leaf for name, leaf in digest.leaves(objects) if dtensors.is_dtensor(leaf)}
    try:
        state_dict_saver.save(tensors, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # a BaseException, the same on every rank
        raise _first_failure(error) from None
    # all ranks have written by now: save() ends with a collective of torch
    names = sorted(os.listdir(folder))
    # the checksums are divided between the ranks: each file is read once
    of_this_rank = names[ranks.rank() :: ranks.world_size()]  # each rank reads some of the files
    facts_of_this_rank = {name: _facts_of(folder, name) for name in of_this_rank}
    facts = {}
    for names_there, facts_there in ranks.gather_objects((names, facts_of_this_rank)):
        if names_there != names:  # then every rank raises
            raise RuntimeError(f"{folder} differs: all processes must see the same --output_dir")
        facts |= facts_there
    # rank 0 writes these with the rest of the state, in the background
    return distributed_states.outline(objects, objects), facts


def _facts_of(folder: str, name: str) -> list[Any]:
    with open(os.path.join(folder, name), "rb", opener=opener) as file:
        return [os.fstat(file.fileno()).st_size, sha256_file(file)]


def load(path: str, objects: dict[str, Any], **options: Any) -> None:
    """Read the sharded tensors of a checkpoint into the tensors of its objects, which may be sharded. Call it
    on every rank. options: of torch.distributed.checkpoint.load(). Raises RuntimeError."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        # torch's own method would execute what the file names
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with open(os.path.join(self.path, ".metadata"), "rb", opener=opener) as file:
                return _Unpickler(file).load()

    # the shapes come from the file; each rank reads only the parts that it needs
    reader = Reader(dtensor_folder(path))
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: leaf for name, leaf in digest.leaves(objects) if name in stored}
    try:
        state_dict_loader.load(tensors, storage_reader=reader, **options)
    except CheckpointException as error:
        raise _first_failure(error) from None


def _first_failure(error: Any) -> RuntimeError:
    rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return RuntimeError(f"rank {rank}: {reason}")


def load_whole(path: str, objects: dict[str, Any]) -> dict[str, Any]:
    """Return the objects of a checkpoint with whole tensors for its meta tensors. Only this process reads."""
    objects = tree_map_only(torch.Tensor, _allocate, objects)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        options = {"no_dist": True} if ranks.is_initialized() else {}  # torch 2.6 has no no_dist
        load(path, objects, **options)
    return objects


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor


class _Unpickler(pickle.Unpickler):
    """An unpickler that executes nothing of the file: torch's own reads .metadata with pickle.load()."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _SAFE.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in .metadata")
