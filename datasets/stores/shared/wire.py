"""One connection to a Redis or Valkey server: what goes over it, and how fast it must come.

redis-py connects (TCP, TLS, AUTH, SELECT). What follows is read here (RESP2), because images are large: each
goes from the socket to where it stays, and only so much is asked for at a time that the server need not
store its answer. redis-py's own MGET made fewer 100 KB values a second than single GETs, this twice as many.
"""

import time

CONNECT, READ = 1.0, 1.0  # seconds: to connect, and without a byte
_SLOWEST = 20e6  # bytes/s: files come faster than that
_BLOCK = 1 << 18  # bytes a system call
_TOGETHER = 800_000  # bytes a request
_AHEAD = 1_600_000  # bytes that were asked for and have not come
_ROOM = 64  # bytes around a value, and
_SLACK = 1 << 16  # for errors that come instead
# What every other command would be answered with, too
_ENDING = {"NOAUTH", "WRONGPASS", "LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN"}

BAD, REFUSED = "bad", "refused"


class Refused(Exception):
    """The server answered with an error, as text."""

    def __init__(self, text: str):
        super().__init__(text)
        self.code = text.partition(" ")[0]


def packed(*words) -> list[bytes]:
    """A command, in pieces to be sent one after another."""
    words = [word if isinstance(word, bytes | memoryview) else str(word).encode() for word in words]
    pieces = [b"*%d\r\n" % len(words)]
    for word in words:
        pieces += b"$%d\r\n" % len(word), word, b"\r\n"
    return pieces


class Wire:
    """connection: a redis.Connection, which is connected now. Raises its errors and OSError."""

    def __init__(self, connection):
        connection.connect()
        self._connection, self._socket = connection, connection._sock
        self._own = bytearray(_SLACK)

    def close(self) -> None:
        self._connection.disconnect()

    def ask(self, commands: list[list[bytes]]) -> list:
        """The answers: bytes, int, None, a list of such, or Refused (not raised)."""
        content = b"".join(piece for command in commands for piece in command)
        self._begin(self._own, READ + len(content) / _SLOWEST)
        self._socket.sendall(content)
        return [self._reply() for _ in commands]

    def values(self, groups: list[list[bytes]], lengths: list[int], buffer: bytearray) -> list:
        """MGET. groups: keys that may be asked for together. lengths: bytes that the values must have, in the
        same order. buffer: of room(lengths) bytes at least.

        A list of the values' places in the buffer, (first, last); None where there is none, BAD where it has
        another length, REFUSED where the server answers with an error, as it does when keys have moved.
        """
        self._begin(buffer, READ + sum(lengths) / _SLOWEST)
        requests, asked, sent, found = _requests(groups, lengths), 0, 0, []
        came = 0
        for keys, size in requests:
            wanted = []
            while sent < len(requests) and asked - came < _AHEAD:
                wanted += packed(b"MGET", *requests[sent][0])
                asked += requests[sent][1]
                sent += 1
            if wanted:
                self._socket.sendall(b"".join(wanted))
            found += self._places(lengths[len(found) : len(found) + len(keys)])
            came += size
        return found

    def _places(self, lengths: list[int]) -> list:
        line = self._line()
        if line.startswith(b"-"):
            if self._judge(line).code == "NOPERM":
                raise Refused(line[1:].decode("utf-8", "replace"))
            return [REFUSED] * len(lengths)
        if line != b"*%d" % len(lengths):
            raise ConnectionError(f"{len(lengths)} values were asked for, the answer begins {line[:20]!r}")
        return [self._place(length) for length in lengths]

    def _place(self, length: int):
        line = self._line()
        size = int(line[1:]) if line.startswith(b"$") else -2
        if size == length:
            first = self._position
            self._take(size + 2)
            return first, first + size
        if size < -1:
            raise ConnectionError(f"a value was expected, the answer is {line[:20]!r}")
        if size >= 0:
            self._skip(size + 2)
            return BAD
        return None

    def _begin(self, buffer: bytearray, seconds: float) -> None:
        self._buffer, self._view, self._position, self._end = buffer, memoryview(buffer), 0, 0
        self._deadline = time.monotonic() + seconds

    def _reply(self):
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return self._judge(line)
        if kind == b":":
            return int(rest)
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else bytes(self._take(size + 2)[:-2])
        if kind == b"*":
            count = int(rest)
            return None if count < 0 else [self._reply() for _ in range(count)]
        raise ConnectionError(f"this is no answer of Redis: {line[:20]!r}")

    def _judge(self, line: bytes) -> Refused:
        refused = Refused(line[1:].decode("utf-8", "replace"))
        if refused.code in _ENDING:
            raise refused
        return refused

    def _line(self) -> bytes:
        while (stop := self._buffer.find(b"\r\n", self._position, self._end)) < 0:
            self._receive()
        line = bytes(self._view[self._position : stop])
        self._position = stop + 2
        return line

    def _take(self, count: int) -> memoryview:
        while self._end < self._position + count:
            self._receive()
        self._position += count
        return self._view[self._position - count : self._position]

    def _skip(self, count: int) -> None:
        """Over what need not be kept."""
        start = self._position
        while count > self._end - start:
            count -= self._end - start
            self._end = start
            self._receive()
        rest = bytes(self._view[start + count : self._end])  # where the right value would have stood
        self._view[start : start + len(rest)] = rest
        self._position, self._end = start, start + len(rest)

    def _receive(self) -> None:
        if self._end == len(self._buffer):
            if self._buffer is not self._own:
                raise ConnectionError("the server sends more than was asked for")
            self._own = bytearray(self._own) + bytes(len(self._own))
            self._buffer, self._view = self._own, memoryview(self._own)
        count = self._socket.recv_into(self._view[self._end : self._end + _BLOCK])
        if not count:
            raise ConnectionError("the server has closed the connection")
        self._end += count
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the answer came more slowly than {_SLOWEST / 1e6:.0f} MB/s")


def room(lengths: list[int]) -> int:
    """Bytes of the buffer for values of these lengths."""
    return sum(lengths) + _ROOM * len(lengths) + _SLACK


def _requests(groups: list[list[bytes]], lengths: list[int]) -> list[tuple[list[bytes], int]]:
    """(keys, bytes of the answer) each."""
    requests, number = [], 0
    for group in groups:
        keys, size = [], 0
        for key in group:
            keys.append(key)
            size += lengths[number]
            number += 1
            if size >= _TOGETHER:
                requests.append((keys, size))
                keys, size = [], 0
        if keys:
            requests.append((keys, size))
    return requests
