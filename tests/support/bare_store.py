"""A client that removes from the answers of a store what the S3 protocol leaves optional."""

from common.object_store.store import ObjectStore

OPTIONAL = ("ETag", "LastModified", "Metadata")


def strip(monkeypatch, fields: tuple[str, ...] = OPTIONAL, conditions: bool = True) -> None:
    """Make every ObjectStore lose these fields. conditions: if False, the store ignores If-Match."""
    connect = ObjectStore._connect

    def remove(parsed: dict, **_) -> None:
        for answer in (parsed, *parsed.get("Contents", ())):
            for field in fields:
                answer.pop(field, None)

    def ignore(params: dict, **_) -> None:
        for name in () if conditions else ("IfMatch", "IfNoneMatch"):
            params.pop(name, None)

    def stripped(self, timeout):
        client = connect(self, timeout)
        for operation in ("GetObject", "HeadObject", "PutObject", "ListObjects"):
            client.meta.events.register(f"after-call.s3.{operation}", remove)
        client.meta.events.register("provide-client-params.s3.PutObject", ignore)
        return client

    monkeypatch.setattr(ObjectStore, "_connect", stripped)
