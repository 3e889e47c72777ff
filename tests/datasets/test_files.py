"""Downloads work from an https server on this machine."""

import hashlib
import http.server
import os
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from bootfile.ground.errors import BadInput
from common.ground.files import ROOT
from datasets.downloads import download
from datasets.files import local_folder

CONTENT = bytes(range(256)) * 20_000
MD5 = hashlib.md5(CONTENT).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        if self.path in ("/to-http", "/to-https"):
            port = self.server.server_port
            self.send_response(302)
            self.send_header(
                "Location", f"http://127.0.0.1:{port}/file" if self.path == "/to-http" else "/file"
            )
            self.end_headers()
        elif self.path == "/missing":
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            if self.path == "/silent":
                self.server.released.wait()
            else:
                self.wfile.write(CONTENT[: 1_000_000 if self.path == "/cut" else None])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.requests, server.released = [], threading.Event()
    server.url = f"https://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["/file", "/to-https"])
def test_download(server, tmp_path, path):
    target = tmp_path / "data" / "archive"
    before = os.umask(0o077)
    try:
        download(server.url + path, str(target), MD5)
    finally:
        os.umask(before)
    assert target.read_bytes() == CONTENT and target.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in target.parent.iterdir()] == ["archive"]


def test_several_processes_fetch_once(server, tmp_path):
    path = str(tmp_path / "data" / "archive")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: download(server.url + "/file", path, MD5), range(4)))
    assert server.requests == ["/file"]


@pytest.mark.parametrize("path, md5, message", [
    ("/to-http", MD5, "redirects to http://.* not https"),
    ("/missing", MD5, "cannot download .*404|Not Found"),
    ("/cut", MD5, "sent 1000000 of 5120000 bytes"),
    ("/silent", MD5, "timed out"),
    ("/file", "0" * 32, f"with md5 {MD5}, expected {'0' * 32}"),
])  # fmt: skip
def test_failed_download_leaves_nothing(server, tmp_path, monkeypatch, path, md5, message):
    if path == "/silent":
        monkeypatch.setattr("datasets.downloads._TIMEOUT", 0.5)
    with pytest.raises(BadInput, match=message):
        download(server.url + path, str(tmp_path / "data" / "archive"), md5)
    assert os.listdir(tmp_path / "data") == []


def test_untrusted_certificate_is_refused(server, tmp_path, monkeypatch):
    other = trustme.CA()
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "other.pem"))
    with pytest.raises(BadInput, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
        download(server.url + "/file", str(tmp_path / "archive"), MD5)
    assert server.requests == []
    with pytest.raises(BadInput, match=r"not an https URL"):
        download("http://127.0.0.1/file", str(tmp_path / "archive"), MD5)


def test_data_url_that_is_no_folder(tmp_path):
    for url in ("gs://bucket/data", "https://host/data"):
        with pytest.raises(BadInput, match=rf"{url} .*URL; expected .*s3:// .*obs://"):
            local_folder(url)
    with pytest.raises(BadInput, match=r"nowhere does not exist"):
        local_folder(str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"not a folder"):
        local_folder(str(tmp_path / "file"))


@pytest.mark.thorough
def test_folders_do_not_load_the_object_stores_code():
    """A job with folders imports neither boto3 nor code that stages a URL; the loaders no torchvision."""
    script = (
        "import sys; import datasets.files, datasets.folders.image_folder, datasets.memory.cifar10\n"
        "import datasets.loaders.backends, datasets.loaders.ray.engine\n"
        "words = ('object_store', 'boto', 'staging', 'torchvision')\n"
        "print([name for name in sys.modules if any(word in name for word in words)])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT) == b"[]\n"
