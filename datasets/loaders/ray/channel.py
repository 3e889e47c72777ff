"""Messages between a process and the one that it has started, and memory that both see.

Whoever is killed leaves nothing: the socket has no name, and the memory has none either.
"""

import mmap
import os
import pickle
import select
import socket
import struct
import threading

_HEADER = struct.Struct("<QI")  # bytes of the message, descriptors with it


class Channel:
    """One end of a socket. Messages are what pickle takes, with descriptors of files. send() may be called by
    several threads."""

    def __init__(self, connection: socket.socket):
        self._socket, self._sending = connection, threading.Lock()

    def send(self, message, descriptors=()) -> None:
        """Raises OSError where the other end is gone."""
        content = pickle.dumps(message, 5)
        with self._sending:
            header = _HEADER.pack(len(content), len(descriptors))
            if descriptors:
                socket.send_fds(self._socket, [header], list(descriptors))
            else:
                self._socket.sendall(header)
            self._socket.sendall(content)

    def receive(self, timeout: float | None = None):
        """(message, descriptors); None where none has come within so many seconds. Raises EOFError where the
        other end is gone."""
        if timeout is not None and not self._ready(timeout):
            return None
        header, descriptors = b"", []
        try:
            while len(header) < _HEADER.size:
                part, found, _, _ = socket.recv_fds(self._socket, _HEADER.size - len(header), 4)
                if not part:
                    raise EOFError("the other end has closed")
                header, descriptors = header + part, descriptors + list(found)
            size, _ = _HEADER.unpack(header)
            content = bytearray(size)
            view = memoryview(content)
            while len(view):
                count = self._socket.recv_into(view)
                if not count:
                    raise EOFError("the other end has closed")
                view = view[count:]
        except OSError as error:
            raise EOFError(str(error)) from error
        return pickle.loads(content), descriptors

    def close(self) -> None:
        self._socket.close()

    def _ready(self, timeout: float) -> bool:
        if self._socket.fileno() < 0:
            raise EOFError("closed")
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))


def mapped(descriptor: int) -> mmap.mmap:
    """The memory behind a descriptor, which is closed."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
