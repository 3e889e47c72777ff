"""Look into packs."""

import zlib

from datasets.stores.pack import PackStore


def damaged(store: PackStore) -> list[int]:
    """Return the ids of the stored samples whose checksum is another one."""
    rows = ((id, store.stored(id)) for id in range(len(store.index)))
    return [id for id, (sample, checksum) in rows if zlib.crc32(sample.content) != checksum]
