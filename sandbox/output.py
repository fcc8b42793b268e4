"""A run's output as it arrives: head and tail kept in constant memory, milestone lines stamped and taken out."""

from __future__ import annotations

import codecs

from sandbox.harness import READY
from sandbox.markers import parse_marker
from sandbox.protocol import Milestone

MAX_MARKER = 128  # bytes; a longer line is no marker
PRELUDE_KEEP = 1 << 16

# Control bytes, zero-width and bidirectional characters would let a program write over an operator's terminal.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (*range(0x200B, 0x2010), *range(0x202A, 0x202F))}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (*range(0x2028, 0x202A), *range(0x2066, 0x206A), 0xFEFF)}


class Output:
    """Fed with chunks and the host time (seconds) at which each was read."""

    def __init__(self, nonce: str, keep_bytes: int) -> None:
        self.total = 0  # bytes printed by the program, markers included
        self.ready_at: float | None = None
        self._milestones: dict[str, float] = {}  # the first time of each: a print in a loop repeats its claim
        self._nonce = nonce
        self._prefix = f"@@{nonce}:".encode() if nonce else b""
        self._keep = keep_bytes
        self._prelude = b""
        self._pending = b""  # may be the beginning of a marker
        self._head = bytearray()
        self._tail = bytearray()
        self._kept = 0

    def feed(self, data: bytes, at: float) -> None:
        if self.ready_at is None:
            data = self._start(data, at)
        self.total += len(data)
        if data:
            self._scan(self._pending + data, at)

    def close(self) -> None:
        """No more output comes: what was held back is ordinary output."""
        self._keep_bytes(self._pending)
        self._pending = b""

    @property
    def prelude(self) -> str:
        """What the box printed before the program started, for a person looking into a fault of ours."""
        return _show(self._prelude)

    @property
    def milestones(self) -> tuple[Milestone, ...]:
        return tuple(Milestone(name, at - (self.ready_at or 0.0)) for name, at in self._milestones.items())

    def text(self) -> tuple[str, str]:
        """Head and tail; the tail is '' where the head holds everything."""
        if not self.truncated:
            return _show(bytes(self._head + self._tail)), ""
        tail = bytes(self._tail[-self._keep :])
        start = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)  # not inside a character
        return _show(bytes(self._head), final=False), _show(tail[start:])

    @property
    def truncated(self) -> bool:
        return self._kept > 2 * self._keep

    def _start(self, data: bytes, at: float) -> bytes:
        """Takes what precedes the harness's first line; returns what follows it."""
        before, ready, after = (self._prelude + data).partition(READY)
        self._prelude = before[-PRELUDE_KEEP:]
        if ready:
            self.ready_at = at
        return after

    def _scan(self, data: bytes, at: float) -> None:
        self._pending = b""
        start = 0
        while self._prefix:
            found = data.find(self._prefix, start)
            if found < 0:
                held = _overlap(data[start:], self._prefix)
                self._keep_bytes(data[start : len(data) - held])
                self._pending = data[len(data) - held :]
                return
            end = data.find(b"\n", found, found + MAX_MARKER)
            if end < 0 and len(data) - found < MAX_MARKER:
                self._keep_bytes(data[start:found])
                self._pending = data[found:]
                return
            name = parse_marker(data[found:end].decode("utf-8", "replace"), self._nonce) if end >= 0 else None
            if name is None:
                self._keep_bytes(data[start : found + len(self._prefix)])
                start = found + len(self._prefix)
            else:  # also behind text without a newline, which a progress display may have left on the line
                self._keep_bytes(data[start:found])
                self._milestones.setdefault(name, at)
                start = end + 1
        self._keep_bytes(data[start:])

    def _keep_bytes(self, data: bytes) -> None:
        self._kept += len(data)
        room = self._keep - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._keep :]
        if len(self._tail) > 2 * self._keep + (1 << 16):
            del self._tail[: -self._keep]


def _overlap(data: bytes, prefix: bytes) -> int:
    """Length of the longest end of data that begins the prefix."""
    return next((n for n in range(min(len(data), len(prefix) - 1), 0, -1) if data.endswith(prefix[:n])), 0)


def _show(data: bytes, final: bool = True) -> str:
    """Bytes as text that a terminal can be given: invalid UTF-8 replaced, control characters escaped."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)
    return text.replace("\r\n", "\n").translate(_ESCAPES)
