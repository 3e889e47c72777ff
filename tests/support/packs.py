"""Look into packs."""

import zlib

from datasets.stores.pack import PackStore


def damaged(store: PackStore) -> list[int]:
    """Return the ids of the stored samples whose checksum is another one."""
    rows = ((id, store._sample(id)) for id in range(len(store.index)))
    return [id for id, (_, _, checksum, content) in rows if zlib.crc32(content) != checksum]
