"""The lease of a URL: an object there. A job replaces only the version that it has read (If-Match)."""

import contextlib
import json
import time

from bootfile.ground.errors import print_line
from bootfile.ground.lease import Lease
from common.object_store.store import ObjectStore, StoreError

KEY = ".bootfile-lease.json"
_RELEASED = "released by"  # in the record of a job that has ended


class UrlLease(Lease):
    """The right to write below the URL of a store."""

    def __init__(self, store: ObjectStore):
        self.store = store
        super().__init__(store.location.url())
        self._check_store()

    def read(self) -> tuple[dict, str | None]:
        """Return the record of the holder, and its ETag."""
        content, etag = self.store.read_version(KEY)
        if etag is None:
            return {}, None
        holder = None
        with contextlib.suppress(ValueError, RecursionError):
            holder = json.loads(content)
        if not isinstance(holder, dict) or not holder:
            holder = {"id": None}  # a damaged record is that of an unknown job
        return ({}, etag) if holder.get(_RELEASED) else (holder, etag)

    def replace(self, version: str | None) -> str | None:
        return self.store.replace(KEY, json.dumps(self.own | {"time": time.time()}).encode(), version)

    def delete(self) -> None:
        """Delete the record. If the store does not delete objects, write into it that the lease is free: the
        next job would wait 25 s otherwise."""
        try:
            self.store.delete([KEY])
        except StoreError as error:
            if not error.forbidden:
                raise
            self.store.replace(KEY, json.dumps({_RELEASED: self.own["id"]}).encode(), self.version)

    def _check_store(self) -> None:
        """Print a warning if the store cannot refuse the write of a second job: If-None-Match must fail. The
        constructor calls it when this job has the lease, so there is a record."""
        reason = ""
        if not self.version:
            reason = "returns no ETag"
        else:
            # this job has the lease, so there is a record: a store with conditions must refuse another first
            # one
            etag = self.replace(None)
            if etag is not None:
                self.version = etag
                reason = "ignores conditional writes"
        if reason:
            print_line(
                f"warning: the store of {self.place} {reason}: two jobs that start there at the same moment "
                "cannot be kept apart; start only one"
            )
