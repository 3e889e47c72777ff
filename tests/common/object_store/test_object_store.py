"""A real server receives exactly the sent bytes, and a failure is one line with its reason."""

import hashlib
import os
import re
import socket
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from bootfile.ground.errors import BadInput
from bootfile.ground.files import sha256_file
from common.ground.files import is_url
from common.object_store import client
from common.object_store import location as object_store_paths
from common.object_store.errors import explain
from common.object_store.location import Location, check_encrypted, find_endpoint, parse
from common.object_store.store import ObjectStore, StoreError
from tests.conftest import environment, free_port, names, run, wait_until
from tests.support.fault_proxy import FaultProxy
from tests.support.hostile_store import HostileStore, listing, reply
from tests.support.object_store_server import CREDENTIALS, ObjectStoreServer

pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")

BIG = 17_000_001  # bytes: parts both ways, the last one short


@pytest.fixture
def store(server, monkeypatch, request):
    """Yield an ObjectStore with a prefix for this test."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BOOTFILE_STORE_TIMEOUT", "60")
    with ObjectStore(f"s3://bucket/{request.node.name.replace('[', '-').rstrip(']')}") as opened:
        yield opened


def through(monkeypatch, proxy, store) -> ObjectStore:
    """Return the same store through a proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.environment["AWS_ENDPOINT_URL_S3"])
    return ObjectStore(store.location.url())


@pytest.mark.thorough
def test_a_store_with_a_certificate_of_ones_own(tmp_path, monkeypatch):
    """MinIO on a company's network has one. Without its file the line names the variable."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    with ObjectStoreServer("bucket", tls=tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with ObjectStore("s3://bucket/run") as store:
            with pytest.raises(StoreError, match="AWS_CA_BUNDLE=FILE") as error:
                store.read("a")
            assert names(str(error.value), f"127.0.0.1:{server.port}", "certificate")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        with ObjectStore("s3://bucket/run") as store:
            store.write("a", b"1")
            assert store.read("a") == b"1"


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", Location("s3", "bucket", "")),
        ("obs://my-bucket/", Location("obs", "my-bucket", "")),
        ("s3://bucket/a/b c/", Location("s3", "bucket", "a/b c")),
    ],
)
def test_urls_are_taken_apart(url, location):
    assert is_url(url) and parse(url) == location
    assert not any(map(is_url, ["/data", "data", "", None, "https://host/a", "redis://host"]))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:///a", "not a bucket name"),
        ("s3://my.bucket/a", "not a bucket name"),
        ("s3://Bucket/a", "not a bucket name"),
        ("s3://bucket/a/../b", "empty part"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/a\nb", "control character"),
        ("https://host/a", "is not s3://"),
        ("s3://me:hunter2@bucket/a", "set AWS_ACCESS_KEY_ID"),
        ("https://me:hunter2@host/a", "is not s3://"),
    ],
)
def test_urls_that_are_none_are_refused(url, words):
    with pytest.raises(BadInput, match=words) as refused:
        parse(url)
    assert "hunter2" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def nowhere(monkeypatch):
    """Set credentials, and no endpoint."""
    check_encrypted.cache_clear()
    for name in ("S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_USE_HTTPS", "OBS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_DEFAULT_REGION")


@pytest.mark.parametrize(
    ("variables", "url", "style"),
    [
        ({"S3_ENDPOINT": "obs.cn-1.myhuaweicloud.com"}, "https://obs.cn-1.myhuaweicloud.com", "virtual"),
        ({"S3_ENDPOINT": "10.0.0.1:9000", "S3_USE_HTTPS": "0"}, "http://10.0.0.1:9000", "path"),
        ({"AWS_ENDPOINT_URL_S3": "http://localhost:9000"}, "http://localhost:9000", "path"),
        ({"AWS_ENDPOINT_URL": "https://store.example/"}, "https://store.example", "virtual"),
        ({"OBS_REGION": "ap-southeast-3"}, "https://obs.ap-southeast-3.myhuaweicloud.com", "virtual"),
    ],
)  # fmt: skip
def test_the_environment_says_where(nowhere, monkeypatch, variables, url, style):
    with pytest.raises(BadInput, match="OBS_REGION"):
        ObjectStore("obs://bucket")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    opened = ObjectStore("obs://bucket")
    assert (opened.client.endpoint.url, opened.client.endpoint.style) == (url, style)
    # what boto3 would request, without sending it
    address = opened.client.s3.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "key"})
    host = url.partition("://")[2]
    expected = f"bucket.{host}/key" if style == "virtual" else f"{host}/bucket/key"
    assert address.partition("?")[0].partition("://")[2] == expected
    if "OBS" in str(variables) or "obs." in host:
        assert opened.client.endpoint.region in host


@pytest.mark.parametrize(
    ("names", "style"),
    [
        ({"store.example"}, "path"),
        ({"store.example", "bucket.store.example"}, "virtual"),
        (set(), "virtual"),  # a proxy may know the names
    ],
)
def test_a_bucket_without_a_host_name_is_in_the_path(nowhere, monkeypatch, names, style):
    def look_up(host, *_, **__):
        if host not in names:
            raise socket.gaierror
        return [host]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://store.example")
    assert ObjectStore("s3://bucket").client.endpoint.style == style


@pytest.mark.parametrize("more", ["/minio", "?tenant=a", "#a"])
def test_an_address_with_a_path_or_a_query_is_refused(nowhere, monkeypatch, more):
    monkeypatch.setenv("S3_ENDPOINT", f"https://store.example{more}")
    with pytest.raises(BadInput, match=r"S3_ENDPOINT is not the address .*https://HOST\[:PORT\]"):
        find_endpoint("s3")


@pytest.mark.parametrize("region", ["cn-north-4/", "obs.cn-north-4.myhuaweicloud.com"])
def test_a_region_that_is_none_is_shown(nowhere, monkeypatch, region):
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    with pytest.raises(BadInput, match=f"^obs:// needs a region such as cn-north-4, not '{region}'"):
        find_endpoint("obs")


def test_less_than_one_attempt_is_one(nowhere, monkeypatch):
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "0.5")
    assert ObjectStore("s3://bucket").client.attempts == 1


@pytest.mark.parametrize(("attempts", "is_passing", "requests"), [(3, True, 3), (2, True, 2), (3, False, 1)])
def test_a_damaged_answer_is_asked_for_again(nowhere, monkeypatch, attempts, is_passing, requests):
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", str(attempts))
    monkeypatch.setattr(client.random, "uniform", lambda low, high: 0.0)  # seconds
    opened = ObjectStore("s3://bucket").client
    count = 0

    def transfer():
        nonlocal count
        count += 1
        raise StoreError("cut", "damaged", again=is_passing)

    with pytest.raises(StoreError):
        opened.repeat(transfer)
    assert count == requests
    answers = iter([StoreError("cut", "damaged", again=True), b"whole"])

    def succeed():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert opened.repeat(succeed) == b"whole"


@pytest.mark.parametrize(
    ("url", "has_aws", "has_obs", "key"),
    [
        ("obs://bucket", True, True, "OBSKEY"),
        ("s3://bucket", True, True, "testing"),
        ("s3://bucket", False, True, "OBSKEY"),
        ("obs://bucket", True, False, "testing"),
    ],
)
def test_the_keys_of_the_environment(nowhere, monkeypatch, url, has_aws, has_obs, key):
    monkeypatch.setenv("OBS_REGION", "cn-north-4")
    obs = {"OBS_ACCESS_KEY_ID": "OBSKEY", "OBS_SECRET_ACCESS_KEY": "secret", "OBS_SECURITY_TOKEN": "token"}
    for name, value in obs.items() if has_obs else ():
        monkeypatch.setenv(name, value)
    if not has_aws:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3 = ObjectStore(url).client.s3
    address = s3.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "key"})
    assert key in address and ("token" in address) == (key == "OBSKEY")


def test_the_regions_of_the_environment(nowhere, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-1")
    assert find_endpoint("s3").region == "eu-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-2")
    assert find_endpoint("s3").region == "eu-2"
    assert find_endpoint("obs").url == "https://obs.eu-2.myhuaweicloud.com"
    monkeypatch.setenv("OBS_REGION", "cn-3")
    assert find_endpoint("obs").url == "https://obs.cn-3.myhuaweicloud.com"
    assert find_endpoint("s3").region == "eu-2"


def test_a_scratch_folder_is_that_of_a_server_and_a_url(nowhere, monkeypatch, tmp_path):
    monkeypatch.setenv("BOOTFILE_SCRATCH", str(tmp_path))
    folders = [object_store_paths.scratch_folder("staged", "s3://bucket/a") for _ in range(2)]
    folders.append(object_store_paths.scratch_folder("staged", "s3://bucket/b"))
    folders.append(object_store_paths.scratch_folder("outputs", "s3://bucket/a"))
    monkeypatch.setenv("S3_ENDPOINT", "https://store.example")
    folders.append(object_store_paths.scratch_folder("staged", "s3://bucket/a"))
    assert folders[0] == folders[1] and len({*folders}) == 4
    assert all(folder.startswith(str(tmp_path)) and os.path.isdir(folder) for folder in folders)


@pytest.mark.parametrize(
    ("code", "status", "again", "later", "forbidden"),
    [
        ("NoSuchUpload", 404, True, True, False),
        ("OperationAborted", 409, True, True, False),
        ("BadDigest", 400, True, True, False),
        ("SlowDown", 503, False, True, False),
        ("InternalError", 500, False, True, False),
        ("AccessDenied", 403, False, False, True),
        ("MethodNotAllowed", 405, False, False, True),
        ("NotImplemented", 501, False, False, True),
        ("NoSuchKey", 404, False, False, False),
    ],
)
def test_what_a_refusal_means(code, status, again, later, forbidden):
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = explain(ClientError(answer, "PutObject"), "s3://bucket/key", "")
    assert (error.reason, error.again, error.later, error.forbidden) == (code, again, later, forbidden)


@pytest.fixture
def calls(nowhere, monkeypatch):
    """A store without a server, and its requests. answers: operation -> its answer, or an error."""
    opened, requests, answers = ObjectStore("s3://bucket/run"), [], {}

    def call(operation, key, **parameters):
        requests.append((operation, key, parameters))
        answer = answers.get(operation, {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(opened.client, "call", call)
    return types.SimpleNamespace(store=opened, requests=requests, answers=answers)


@pytest.mark.parametrize(
    ("etag", "condition"), [(None, {"IfNoneMatch": "*"}), ("e1", {"IfMatch": "e1"}), ("", {})]
)
def test_the_condition_of_a_replacement(calls, etag, condition):
    calls.answers["put_object"] = {"ETag": '"e2"'}
    assert calls.store.replace("key", b"1", etag) == "e2"
    [(_, _, parameters)] = calls.requests
    assert {name: value for name, value in parameters.items() if name.startswith("If")} == condition
    for reason in ("PreconditionFailed", "412", "404"):
        calls.answers["put_object"] = StoreError("other", reason)
        assert calls.store.replace("key", b"1", "e1") is None
    calls.answers["put_object"] = StoreError("no", "AccessDenied")
    with pytest.raises(StoreError):
        calls.store.replace("key", b"1", etag)


def test_the_digest_of_an_object_is_one_of_its_bytes(calls, tmp_path):
    md5, sha256 = hashlib.md5(b"1").hexdigest(), hashlib.sha256(b"1").hexdigest()
    answer = {"ContentLength": 1, "ETag": f'"{md5}"', "ResponseMetadata": {"HTTPHeaders": {}}}
    calls.answers["head_object"] = answer
    for more, expected in (
        ({}, (None, md5)),
        ({"Metadata": {"SHA256": sha256.upper()}}, (sha256, md5)),
        ({"Metadata": {"sha256": "none"}}, (None, md5)),
        ({"ETag": f'"{md5}-2"'}, (None, None)),  # of several parts
        ({"ResponseMetadata": {"HTTPHeaders": {"x-amz-server-side-encryption": "aws:kms"}}}, (None, None)),
    ):
        calls.answers["head_object"] = answer | more
        entry = calls.store.head("key")
        assert (entry.sha256, entry.md5) == expected
    for given, has_digest in ((sha256, True), (None, False)):
        body = types.SimpleNamespace(read=lambda count: b"1")
        calls.answers["get_object"] = answer | {"ETag": "", "Body": body}
        assert calls.store.fetch("key", str(tmp_path / "file"), 1, sha256=given) == has_digest


def test_bytes_that_come_again_are_taken_back_from_the_progress(calls):
    for failure in (None, StoreError("cut", "damaged", again=True)):
        progress = []
        with pytest.raises(StoreError), calls.store._transfer("key", 10, progress.append) as options:
            options["Callback"](4)
            if failure:
                raise failure
        assert progress == [4, -4]
    with calls.store._transfer("key", 10, progress.append) as options:
        options["Callback"](10)
    assert progress == [4, -4, 10]


def test_the_limits_of_the_environment(nowhere, monkeypatch):
    monkeypatch.setenv("BOOTFILE_STORE_TIMEOUT", "7")
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "3")
    config = ObjectStore("s3://bucket", threads=2).client.s3.meta.config
    assert (config.read_timeout, config.connect_timeout) == (7, 10)
    assert config.retries["total_max_attempts"] == 3
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("BOOTFILE_STORE_TIMEOUT", wrong)
        with pytest.raises(BadInput, match=f"BOOTFILE_STORE_TIMEOUT={wrong} "):
            ObjectStore("s3://bucket")


def test_an_upload_without_a_date_may_be_running(calls, monkeypatch):
    uploads = [{"Key": "run/a/big", "UploadId": "7"}]
    monkeypatch.setattr(calls.store.client, "entries", lambda *words, **options: uploads)
    [(key, id, began)] = calls.store.uploads()
    assert (key, id) == ("a/big", "7") and began == pytest.approx(time.time(), abs=60)


def test_a_pause_in_an_upload_is_one_that_may_end_later():
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": "RequestTimeout"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    error = explain(ClientError(answer, "PutObject"), "s3://bucket/key", "")
    assert error.later and "RequestTimeout" in str(error)


def test_clear_text_to_another_machine_is_refused_or_said(nowhere, monkeypatch, tmp_path, capsys):
    name = "AWS_ENDPOINT_URL_S3"
    for url in ("http://obs.example.com", "http://192.0.2.1:9000", "http://localhost.example"):
        for each in ("AWS_ENDPOINT_URL", "S3_ENDPOINT", name):
            with (
                monkeypatch.context() as patch,
                pytest.raises(BadInput, match=f"{url} is not encrypted.*S3_USE_HTTPS"),
            ):
                patch.setenv(each, url)
                find_endpoint("s3")
    for local in ("http://127.0.0.2:1", "http://localhost:1", "http://[::1]:1"):
        monkeypatch.setenv(name, local)
        assert find_endpoint("s3").url == local
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {url}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv(name)
    with pytest.raises(BadInput, match="not encrypted"):
        ObjectStore("s3://bucket")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("S3_USE_HTTPS", "0")
    for _ in range(2):
        assert ObjectStore("s3://bucket").client.s3.meta.endpoint_url == url
    assert capsys.readouterr().err.count(f"warning: {url} is not encrypted") == 1
    wrong = ["http://me:hunter2@host", "ftp://host", "http://", "http://host:none", "http://ho st"]
    wrong += ["https://.", "https://a..b", f"https://{'a' * 64}.example", "https://a\n", "https://[:]"]
    for endpoint in wrong:
        monkeypatch.setenv("S3_ENDPOINT", endpoint)
        with pytest.raises(BadInput, match="S3_ENDPOINT") as refused:
            find_endpoint("s3")
        assert "hunter2" not in str(refused.value)


def test_small_objects(store):
    assert list(store.list()) == []
    assert store.head("a") is None
    store.write("a", b"hello")
    store.write("sub/ü +%&", b"")
    store.write("sub/", b"")  # a folder, as a console makes it
    assert (store.read("a"), store.read("sub/ü +%&")) == (b"hello", b"")
    assert [(entry.key, entry.size) for entry in store.list()] == [("a", 5), ("sub/ü +%&", 0)]
    assert [entry.key for entry in store.list("sub/")] == ["sub/ü +%&"]
    assert [entry.key for entry in store.list("su")] == []
    assert list(store.folders()) == ["sub"]
    found = store.head("a")
    assert (found.size, found.sha256) == (5, hashlib.sha256(b"hello").hexdigest())
    assert abs(found.modified - time.time()) < 60
    store.delete(["a", "nothing"])
    assert store.head("a") is None


@pytest.mark.parametrize("page", [1, 7, 20, 21])
def test_listings_go_on_after_a_page(store, monkeypatch, page):
    monkeypatch.setattr(client, "_PAGE", page)
    for number in range(20):
        store.write(f"{number:02}/x", b"")
    assert [entry.key for entry in store.list()] == [f"{number:02}/x" for number in range(20)]
    assert list(store.folders()) == [f"{number:02}" for number in range(20)]


def _file(path, size: int) -> str:
    path.write_bytes(os.urandom(size))
    return str(path)


@pytest.mark.parametrize("size", [0, 1, 2**23, 2**23 + 1, BIG])
def test_files_come_back(store, tmp_path, size):
    path, sent, came = _file(tmp_path / "file", size), [], []
    store.send(path, "key", sent.append)
    assert store.head("key").sha256 == sha256_file(path)
    store.fetch("key", str(tmp_path / "back"), size, progress=came.append)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
    assert (sum(sent), sum(came)) == (size, size)
    assert sorted(os.listdir(tmp_path)) == ["back", "file"]


@pytest.mark.thorough
def test_what_was_not_uploaded_by_us_is_compared_with_its_md5(store, server, tmp_path, monkeypatch):
    content = os.urandom(300_000)
    server.client().put_object(Bucket="bucket", Key=f"{store.location.prefix}/key", Body=content)
    with FaultProxy(server.port, "flip", seed=5, share=0.5) as proxy:
        for number in range(4):
            path = tmp_path / str(number)
            through(monkeypatch, proxy, store).fetch("key", str(path), len(content))
            assert path.read_bytes() == content
        assert proxy.struck


@pytest.mark.thorough
def test_a_file_is_sent_again_if_the_answer_to_its_last_request_was_lost(store, tmp_path):
    """The answer to boto3's second attempt is "no such upload"."""
    from botocore.awsrequest import AWSResponse

    sent, refusal = [], b"<Error><Code>NoSuchUpload</Code></Error>"

    def refuse_second(request, **_):
        sent.append(request)
        if len(sent) == 2:
            body = types.SimpleNamespace(stream=lambda *_, **__: [refusal])
            return AWSResponse(request.url, 404, {}, body)
        return None

    events, operation = store.client.s3.meta.events, "s3.CompleteMultipartUpload"
    events.register(f"before-send.{operation}", refuse_second)
    events.register_first(f"needs-retry.{operation}", lambda **_: 0 if len(sent) == 1 else None)
    store.send(_file(tmp_path / "file", BIG), "key")
    # more than 3 if a busy machine answers late
    assert len(sent) >= 3 and store.head("key").size == BIG


def test_a_multipart_upload_that_fails_is_taken_back(store, tmp_path):
    def refuse(params, **_):
        if params["query_string"]["partNumber"] == 2:
            raise StoreError("refused")

    store.client.s3.meta.events.register("before-call.s3.UploadPart", refuse)
    with pytest.raises(StoreError, match="refused"):
        store.send(_file(tmp_path / "file", BIG), "key")
    assert list(store.uploads()) == [] and store.head("key") is None


@pytest.mark.parametrize(
    ("given", "body"),
    [
        ("bytes 0-{last}/1000000000000000", b"x" * 2**23),
        ("bytes 0-{last}/{size}", b"x" * 2**24),
        (None, b"x" * 2**25),
        ("nonsense", b"x"),
    ],
)
def test_answers_to_a_part_that_are_none(store, monkeypatch, tmp_path, given, body):
    """No more than the expected size is read or asked for."""

    def answer(method, key, query):
        if method == "HEAD":
            return reply(Content_Length=str(BIG))
        span = given and given.format(last=len(body) - 1, size=BIG)
        return [reply(status=206, Content_Length=str(len(body)), Content_Range=span), body]

    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "1")
    with HostileStore(answer) as hostile, pytest.raises(StoreError, match="/key: "):
        through(monkeypatch, hostile, store).fetch("key", str(tmp_path / "back"), BIG)
    assert os.listdir(tmp_path) == [] and hostile.requests < 10


# a proxy, or a console at the address, may answer every request with status 200
PAGE = reply(b"<!DOCTYPE html><html><body>Please sign in</body></html>", Content_Type="text/html", ETag=None)
UPLOADS = b"<IsTruncated>true</IsTruncated><NextKeyMarker>a</NextKeyMarker>"
ENDLESS = reply(b"<ListMultipartUploadsResult>" + UPLOADS + b"</ListMultipartUploadsResult>")
ANSWERS = [  # call, function(prefix of the store, last key of the listing), words of the error
    ("read", lambda below, _: reply(b"hello", Content_Length=None), "cannot be read"),
    ("read", lambda below, _: reply(b"hello", Content_Length="-5"), "-5 bytes, expected at most"),
    ("read", lambda below, _: reply(b"hello", Content_Length="x"), "cannot be read"),
    ("read", lambda below, _: reply(b"hello", Content_Length=str(10**11)), "expected at most"),
    ("list", lambda below, _: listing(f"{below}a", truncated=True), "does not end"),
    ("list", lambda below, last: listing(below + "ab"["a" in last], truncated=True), "does not end"),
    ("list", lambda below, _: listing("/etc/passwd"), "lists /etc/passwd"),
    ("list", lambda below, _: listing(f"{below}a", Key=None), "cannot be read"),
    ("list", lambda below, _: listing(f"{below}a", LastModified="9" * 20), "cannot be read"),
    ("list", lambda below, _: listing(f"{below}a", Size="9" * 5000), "cannot be read"),
    ("uploads", lambda below, _: ENDLESS, "does not end"),
]
for each in ("list", "folders", "uploads", "write", "delete"):
    ANSWERS.append((each, lambda below, _: PAGE, r"not an object store .*'<!DOCTYPE html>"))


@pytest.mark.parametrize(("call", "answer", "words"), ANSWERS)
def test_answers_that_are_none(store, monkeypatch, call, answer, words):
    below = f"{store.location.prefix}/"
    arguments = {"read": ["key"], "write": ["key", b"1"], "delete": [["key"]]}.get(call, [])
    with HostileStore(lambda method, key, query: answer(below, query.get("marker", ""))) as hostile:
        broken = through(monkeypatch, hostile, store)
        broken.client.attempts = 1
        with pytest.raises(StoreError, match=words):
            list(getattr(broken, call)(*arguments) or ())


@pytest.mark.parametrize("optional", [{"ETag": None}, {"ETag": None, "LastModified": None}])
def test_a_listing_needs_no_order_no_etag_and_no_date(store, monkeypatch, optional):
    """Some stores list in the order of a tree, or in none, and their pages may overlap."""
    pages = {"": "ca", "a": "abd", "d": ""}  # marker -> keys of the page after it
    below = f"{store.location.prefix}/"

    def answer(method, key, query):
        keys = pages[query.get("marker", "").removeprefix(below)]
        return listing(*(below + each for each in keys), truncated=bool(keys), **optional)

    with HostileStore(answer) as server:
        entries = list(through(monkeypatch, server, store).list())
    assert [each.key for each in entries] == ["c", "a", "b", "d"]
    assert {each.etag for each in entries} == {""}


def test_a_listing_that_may_be_cut_is_refused(store, monkeypatch):
    monkeypatch.setattr(client, "_PAGE", 2)
    text = "".join(f"<Contents><Key>{each}</Key><Size>1</Size></Contents>" for each in ("a", "b"))
    answer = reply(f"<ListBucketResult>{text}</ListBucketResult>".encode(), Content_Type="application/xml")
    with HostileStore(lambda *_: answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.environment["AWS_ENDPOINT_URL_S3"])
        with pytest.raises(StoreError, match="whether the listing ends"):
            list(ObjectStore("s3://bucket").list())


def test_an_object_is_read_without_etag_and_date(store, monkeypatch):
    def answer(method, key, query):
        return reply(b"hello" if method == "GET" else b"", ETag=None, Last_Modified=None)

    with HostileStore(answer) as server:
        bare = through(monkeypatch, server, store)
        assert bare.read_version("key") == (b"hello", "") and bare.head("key").modified == 0
        assert bare.write("key", b"hello") == ""


def test_the_name_of_the_digest_may_have_capital_letters(store, monkeypatch):
    """rclone serve s3 writes every header so."""
    with HostileStore(lambda *_: reply(b"", X_Amz_Meta_Sha256="0" * 64)) as server:
        assert through(monkeypatch, server, store).head("key").sha256 == "0" * 64


def test_an_object_is_replaced_only_if_it_has_not_changed(store):
    first = store.replace("key", b"1", None)
    assert first and store.replace("key", b"2", None) is None
    assert store.read_version("key") == (b"1", first)
    second = store.replace("key", b"2", first)
    assert second and store.replace("key", b"3", first) is None and store.read("key") == b"2"
    store.delete(["key"])
    assert store.replace("key", b"3", second) is None and store.read_version("key") == (b"", None)


def test_an_object_that_is_replaced_while_it_is_read_is_refused(store, server, tmp_path, monkeypatch):
    prefix = store.location.prefix
    server.client().put_object(
        Bucket="bucket", Key=f"{prefix}/key", Body=os.urandom(BIG)
    )  # without our digest
    with FaultProxy(server.port) as proxy:
        through_proxy = through(monkeypatch, proxy, store)
        proxy.held, proxy.passed = "/key", 3  # its last part waits
        with ThreadPoolExecutor(1) as pool:
            fetched = pool.submit(through_proxy.fetch, "key", str(tmp_path / "back"), BIG)
            wait_until(lambda: proxy.holding)
            server.client().put_object(Bucket="bucket", Key=f"{prefix}/key", Body=os.urandom(BIG))
            proxy.released.set()
            with pytest.raises(StoreError, match="replaced while"):
                fetched.result()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_not_what_it_should_be_is_refused(store, tmp_path):
    (tmp_path / "file").write_bytes(b"hello")
    with pytest.raises(BadInput, match="has changed"):
        store.send(str(tmp_path / "file"), "key", sha256="0" * 64)
    with pytest.raises(BadInput, match="changed while"):
        store.send(str(tmp_path / "file"), "key", lambda count: (tmp_path / "file").write_bytes(b"other"))
    assert store.head("key") is None
    store.write("key", b"hello")
    with pytest.raises(StoreError, match=r"5 bytes, expected 6.*replaced"):
        store.fetch("key", str(tmp_path / "back"), 6)
    store.client.attempts = 2
    with pytest.raises(StoreError, match=r"bucket/.*/key: .*not those that were sent"):
        store.fetch("key", str(tmp_path / "back"), 5, sha256="0" * 64)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("kind", "words"), [("expired", "the credentials have expired"), ("forbidden", "no permission")]
)
def test_what_the_store_refuses_is_one_line(server, store, monkeypatch, kind, words):
    with FaultProxy(server.port, kind, share=1.0) as proxy:
        refusing = through(monkeypatch, proxy, store)
        for call in (lambda: refusing.read("key"), lambda: refusing.write("key", b"")):
            with pytest.raises(StoreError, match=words) as refused:
                call()
            said = str(refused.value)
            assert said.startswith(f"s3://bucket/{store.location.prefix}/key: ")
            assert "\n" not in said and CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in said
        assert proxy.requests == 2  # no second attempt


def test_the_answer_to_a_head_request_names_no_reason(server, store, monkeypatch):
    said = r"/key: .*perhaps the credentials have expired.* \(400\)"
    with FaultProxy(server.port, "expired", share=1.0) as proxy, pytest.raises(StoreError, match=said):
        through(monkeypatch, proxy, store).head("key")


def test_another_refusal_with_the_same_status_keeps_its_own_reason():
    answer = {"Error": {"Code": "InvalidArgument"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    error = pytest.importorskip("botocore.exceptions").ClientError(answer, "PutObject")
    said = explain(error, "s3://bucket/key", "store")
    assert str(said) == "s3://bucket/key: the store refused (status 400) (InvalidArgument)"


def test_what_is_not_there_is_one_line(store, monkeypatch):
    nothing = ObjectStore("s3://nothing")
    for call, words in (
        (lambda: nothing.write("key", b""), "s3://nothing/key: no such bucket"),
        (lambda: list(nothing.list()), "s3://nothing: no such bucket"),
        (lambda: store.read("key"), "/key: no such object"),
        (lambda: store.fetch("key", "/nowhere", 10), "/key: .*no such object"),
    ):
        with pytest.raises(StoreError, match=words):
            call()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "2")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:\d+ cannot be reached") as refused:
        ObjectStore("s3://bucket/x").read("key")
    assert refused.value.reason == "EndpointConnectionError"


def test_a_store_that_restarts_is_awaited_by_all_threads(server, store, monkeypatch):
    store.write("key", b"1")
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "8")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{(port := free_port())}")
    away = ObjectStore(store.location.url())
    with ThreadPoolExecutor(16) as pool:
        contents = pool.map(lambda _: away.read("key"), range(16))
        time.sleep(1)
        with FaultProxy(server.port, port=port):
            assert list(contents) == [b"1"] * 16


def test_a_server_that_does_not_answer_is_no_error_of_the_disk(store, monkeypatch, tmp_path):
    """boto3's time-outs are OSErrors too."""
    monkeypatch.setenv("BOOTFILE_STORE_ATTEMPTS", "1")
    monkeypatch.setenv("BOOTFILE_STORE_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"/key: 127\.0\.0\.1:\d+ stopped answering"):
            ObjectStore("s3://bucket/x").send(_file(tmp_path / "file", 10), "key")


def test_no_credentials(store, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreError, match=r"credentials.*set AWS_ACCESS_KEY_ID"):
        ObjectStore("s3://bucket/x").read("key")
    monkeypatch.setenv("OBS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("OBS_SECRET_ACCESS_KEY", "testing-secret")
    ObjectStore("obs://bucket/x").write("key", b"")


def test_stopped_stores_end_soon(store, tmp_path):
    store.send(_file(tmp_path / "file", BIG), "key")
    with pytest.raises(StoreError, match="key: interrupted"):
        store.fetch("key", str(tmp_path / "back"), BIG, progress=lambda count: store.stop())
    with pytest.raises(StoreError, match="key: interrupted"):
        store.read("key")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "key",
    ["../x", "/x", "a/../../x", "a//x", "a\\x", "a\0x", "a\nx", "", ".", "a/", "x" * 256, "\ud800",
     ".partial-0123456789abcdef"],
)  # fmt: skip
def test_hostile_keys_never_become_paths(tmp_path, key):
    with pytest.raises(BadInput, match="key") as refused:
        object_store_paths.check_keys([key], "s3://bucket")
    assert "\n" not in str(refused.value) and str(refused.value).isprintable()


def test_keys_through_links_and_files(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "out").symlink_to(tmp_path)
    with pytest.raises(BadInput, match="a link leads out"):
        object_store_paths.make_path(str(tmp_path / "in"), "out/x")
    (tmp_path / "in" / "a").write_text("")
    with pytest.raises(BadInput, match=r"key a/b: .*folder .*file"):
        object_store_paths.make_path(str(tmp_path / "in"), "a/b")
    with pytest.raises(BadInput, match=r"key a .*file and .*folder"):
        object_store_paths.check_keys(["a/b", "a"], "s3://bucket")
    assert object_store_paths.make_path(str(tmp_path / "in"), "b/c d") == str(tmp_path / "in/b/c d")


def test_boto3_is_imported_when_it_is_needed_and_named_when_it_is_missing(server):
    script = (
        "import sys; from common.object_store.store import ObjectStore\n"
        "assert not {'boto3', 'botocore', 'torch'} & set(sys.modules)\n"
        "sys.modules['boto3'] = None\n"
        "from common.distributed.entry import entry\n"
        "entry(lambda: ObjectStore('s3://bucket').read('x'))()"
    )
    result = run("-c", script, code=2, env=environment(**server.environment), fresh=True)
    assert re.fullmatch(r"error: .*boto3 \(.*boto3.*\): pip install boto3\n", result.stderr)
    assert len(result.stderr.splitlines()) == 1


def test_several_that_fetch_the_same_file_at_a_time(store, tmp_path):
    store.send(_file(tmp_path / "file", BIG), "key")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: store.fetch("key", str(tmp_path / "back"), BIG), range(3)))
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["back", "file"]
