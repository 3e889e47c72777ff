"""Start workers of Ray by forking a process that has imported Ray and torch, which saves seconds for each.

With the path of a socket, this program is the server. Otherwise Ray has started it in place of its
setup_worker.py: it asks the server for a fork that executes Ray's default_worker.py, and ends.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PLACE = "RAY_FORKS"  # environment variable with the path of the server's socket
_LONGEST = 1 << 18  # bytes of a request
_NOT_RAYS = ("--serialized-runtime-env-context", "--language")  # of setup_worker.py


def start(folder: str, env: dict[str, str]) -> dict[str, str]:
    """Start a server, which ends with this process or if it is killed. Return what Ray's environment needs.

    env: variables that mark the server as a process of the cluster.
    """
    from tests.support import preloaded

    place = os.path.join(folder, "forks")
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, place], cwd=_ROOT,
        env=os.environ | env | {"OMP_NUM_THREADS": "1", "ROOM": "x" * preloaded.ROOM},
    )  # fmt: skip
    while not os.path.exists(place):
        assert process.poll() is None, f"{__name__} ended with {process.returncode}"
        time.sleep(0.01)
    return {_PLACE: place}


def _ask(words: list[str]) -> None:
    request = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[_PLACE])
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        server.recv(1)


def _serve(place: str) -> None:
    from tests.support import preloaded

    preloaded.die_with_parent(signal.SIGKILL)
    preloaded._load_packages(["torch", "aiohttp", "google.protobuf.descriptor_pb2", "jsonschema", "yaml"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen(64)
        while True:
            client, _ = listener.accept()
            content, files, _, _ = socket.recv_fds(client, _LONGEST, 3)
            if not os.fork():
                break
            client.close()
            for file in files:
                os.close(file)
    client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    more = {"new_session": True, "dies_with_parent": signal.SIGKILL, "blocked": []}
    request = json.loads(content)
    preloaded._become(request | more | {"files": dict(enumerate(files))})
    preloaded._execute(request["words"])


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(sys.argv[1])
    else:
        _ask([word for word in sys.argv[1:] if not word.startswith(_NOT_RAYS)])
