"""Index a data set once on each node: its first process scans the files, the others open its index."""

import socket
from collections.abc import Callable

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from common.distributed import barrier
from common.distributed.barrier import beating
from common.ground.files import is_url
from datasets import files
from datasets.folders import image_folder, image_index, paired_images, tar_files
from datasets.folders.image_index import ImageFolderIndex

_NAME = "indexed"  # of the barrier


def load(root: str, function: Callable[[], list[ImageFolderIndex]]) -> list[ImageFolderIndex]:
    """Return function() on every rank. The first process of a node calls it, and the others open the indexes
    that it has returned. Call it once in a job, for all data sets.

    Nodes work at the same time, for up to six hours, and may share the folder of the indexes. root: of the
    images; all ranks take part in the copy of a URL. Raises BadInput on every rank if one fails.
    """
    # a collective of all ranks, so before they part: the first process of a node copies
    if is_url(root):
        folder = root
        if root.endswith(".tar"):  # a pattern: the folder before its first wildcard
            folder, _ = tar_files.split_pattern(root)
        files.local_folder(folder)
    host = socket.gethostname()
    indexes: list[ImageFolderIndex] = []
    error = None
    # every rank learns the host names of all, and finds the same first process for its node
    first = ranks.gather_objects(host).index(host)  # rank of the node's first process
    if first == ranks.rank():
        try:
            with beating(_NAME):
                indexes = function()
        except BadInput as refusal:  # raised on every rank by wait_for_all()
            error = refusal
    # the other ranks wait here, for hours if need be: heartbeats tell that the scan lives
    barrier.wait_for_all(_NAME, "to index the images", error)
    # the indexes are on the disk now: the others of the node map the same files
    places = ranks.gather_objects([(index.folder, index.fingerprint) for index in indexes])[first]
    if indexes:
        return indexes
    try:
        return [image_index.open_index(*place) for place in places]
    except BadInput:  # containers of one node have one host name, but perhaps different disks
        return function()


def load_pairs(
    root: str, split: str, cache: str, rows: int, log: image_folder.Log
) -> paired_images.PairIndex:
    """Return the pairs of a split on every rank, as load() does. Arguments: those of paired_images.load()."""

    def load_stored() -> list[ImageFolderIndex]:
        return [paired_images.load(root, split, cache, rows, log).stored]

    [index] = load(root, load_stored)
    return paired_images.PairIndex(index, rows)
