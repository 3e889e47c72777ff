"""Notices of preemption are read as the clouds give them, from one address, and nothing else is asked."""

import http.client
import time

import pytest

from bootfile.ground.errors import BadInput
from bootfile.processes import notices
from tests.support.metadata_server import PATHS, TIME, TOKENS, MetadataServer, event

MET = {"aws": f"terminate at {TIME}", "google": "within 30 s", "alibaba": f"release at {TIME}"}
MET["azure"] = "Preempt at Mon, 30 Nov 2026 08:22:00 GMT"


@pytest.fixture(autouse=True)
def proxy(monkeypatch):
    """A proxy that gets no request, and no variable of another test."""
    for variable in ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "GCE_METADATA_HOST", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with MetadataServer() as server:
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(variable, f"http://{server.address}")
        yield
        assert server.requests == []


@pytest.mark.parametrize("cloud", notices.CLOUDS)
def test_a_notice_of_each_cloud(cloud):
    with MetadataServer(cloud) as server:
        source = notices.find_source(f"{cloud}=http://{server.address}")
        assert source.find() == ""
        server.has_notice = True
        assert (source.name, source.find()) == (cloud, MET[cloud])
        asked = {path for _, path, _ in server.requests}
        assert PATHS[cloud] in asked and len(asked) == (1 if cloud == "google" else 2)


@pytest.mark.parametrize("cloud", TOKENS)
def test_a_machine_without_tokens_is_asked_without_one(cloud):
    with MetadataServer(cloud, has_notice=True) as server:
        server.has_tokens = False
        assert notices.Metadata(cloud, server.address).find() == MET[cloud]


def test_an_event_of_azure_is_one_of_this_machine():
    with MetadataServer("azure", has_notice=True) as server:
        source = notices.Metadata("azure", server.address)
        server.events = [event("Preempt", "nodes_2"), event("Reboot"), event("Freeze"), event("Redeploy")]
        assert source.find() == ""
        server.events.append(event("Terminate", "nodes_2", "NODES_1"))
        assert source.find().startswith("Terminate at ")
        server.name = None  # it is not known which machine this is
        assert source.find().startswith("Preempt at ")


@pytest.mark.parametrize("variable", ["AWS_EC2_METADATA_SERVICE_ENDPOINT", "GCE_METADATA_HOST"])
def test_the_address_may_be_that_of_the_vendors_programs(variable, monkeypatch):
    cloud, scheme = ("aws", "http://") if "AWS" in variable else ("google", "")
    with MetadataServer(cloud, has_notice=True) as server:
        monkeypatch.setenv(variable, f"{scheme}{server.address}")
        assert notices.find_source(cloud).find() == MET[cloud]


def test_a_file_is_a_notice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    source = notices.find_source("lr=0.1/notice")
    monkeypatch.chdir("/")
    assert source.find() == ""
    (tmp_path / "lr=0.1" / "notice").touch()
    assert source.find() == "the file exists"


@pytest.mark.parametrize(
    "given",
    ["gcp", "AWS", "", "aws=", "aws=https://127.0.0.1", "aws=http://", "aws=http://a:port",
     "http://127.0.0.1/notice", "azure=http://127.0.0.1/path", "aws=http://user@127.0.0.1"],
)  # fmt: skip
def test_another_word_is_refused(given):
    with pytest.raises(BadInput) as raised:
        notices.find_source(given)
    assert "http://HOST:PORT" in str(raised.value)


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize("cloud", notices.CLOUDS)
@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\xff\x00 no head", b"HTTP/1.1 403 Forbidden\r\n\r\n", HEAD + b"<html>", HEAD + b"\xff\xfe",
        HEAD + b"[" * 50_000, HEAD + b"null", HEAD + b'{"Events": 3}', HEAD + b'["action"]',
    ],
)  # fmt: skip
def test_a_wrong_answer_is_an_error_and_no_notice(cloud, answer):
    with MetadataServer() as server:
        server.raw = lambda: [answer]
        with pytest.raises(Exception) as raised:
            notices.Metadata(cloud, server.address).find()
        assert not isinstance(raised.value, AssertionError) and server.requests


@pytest.mark.parametrize("cloud", notices.CLOUDS)
def test_a_redirect_is_not_followed(cloud):
    with MetadataServer(cloud, has_notice=True) as other, MetadataServer() as server:
        place = f"http://{other.address}{PATHS[cloud]}"
        server.raw = lambda: [f"HTTP/1.1 302 Found\r\nLocation: {place}\r\n\r\n".encode()]
        with pytest.raises(BadInput, match="302"):
            notices.Metadata(cloud, server.address).find()
        assert other.requests == []


def test_a_server_that_hangs_is_left(monkeypatch):
    monkeypatch.setattr(notices, "_SECONDS", 0.2)
    with MetadataServer() as server:

        def wait():
            server.closed.wait()
            yield b""

        server.raw = wait
        with pytest.raises(OSError):
            notices.Metadata("aws", server.address).find()


SLOW = HEAD.replace(b"\r\n\r\n", b"\r\nX: ")


@pytest.mark.parametrize("head", [b"", SLOW, HEAD, HEAD.replace(b"OK\r\n", b"OK\r\nContent-Length: 900\r\n")])
def test_a_server_that_sends_byte_by_byte_is_left(head, monkeypatch):
    monkeypatch.setattr(notices, "_SECONDS", 0.3)
    with MetadataServer() as server:

        def send_slowly():
            yield head
            while not server.closed.wait(0.05):
                yield b" "

        server.raw = send_slowly
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            notices.Metadata("google", server.address).find()
        assert time.monotonic() - began < 3


def test_an_answer_that_is_cut_is_an_error():
    with MetadataServer() as server:
        server.raw = lambda: [HEAD.replace(b"OK\r\n", b"OK\r\nContent-Length: 20\r\n")]
        with pytest.raises(http.client.IncompleteRead):
            notices.Metadata("alibaba", server.address).find()


def test_no_server_is_noticed_before_its_first_answer_would_be_late(monkeypatch):
    times = []

    def connect(address, timeout, *_):
        times.append(timeout)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", connect)
    with pytest.raises(TimeoutError):
        notices.Metadata("azure").find()
    assert times == [notices._SECONDS]


def test_the_first_answer_of_azure_may_be_late(monkeypatch):
    monkeypatch.setattr(notices, "_SECONDS", 0.05)
    with MetadataServer() as server:
        source = notices.Metadata("azure", server.address)

        def late():
            server.closed.wait(0.3)
            yield HEAD + b'{"Events": []}'

        server.raw = late
        assert source.find() == ""
        with pytest.raises(TimeoutError):
            source.find()
