"""Counts XLA compilations: after a run's second step there should be none."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Listens for as long as it is open; `read` returns how many programs were compiled since the last reading."""

    def __init__(self) -> None:
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def read(self) -> int:
        count, self._count = self._count, 0
        return count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self._count += event == _EVENT
