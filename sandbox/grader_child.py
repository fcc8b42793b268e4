"""The grader's own process: pays its imports and reads answers once, then forks a child for every grading.

It has one thread and no state of the trainer, so forking is safe. A child has a limit on memory and an alarm that kills
it wherever it hangs. Requests come on stdin, each a line of JSON and then the submission's bytes; answers go to stdout,
a line of JSON each. When stdin ends (the trainer closed it, or died) the process ends and takes its children along.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
from typing import Any

_DETAIL = 300  # characters of an error that are passed on


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    devnull = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # a grade function may print
        os.dup2(devnull, fd)
    config = json.loads(sys.argv[1])
    try:
        for name in ("sandbox.submission", "pandas", *config["preload"]):
            importlib.import_module(name)
    except Exception as error:
        _send(answers, {"fatal": f"{type(error).__name__}: {error}"[:_DETAIL]})
        return
    gc.collect()
    gc.freeze()  # children don't touch, and so don't copy, what is imported
    _send(answers, {"ready": True})
    _serve(requests, answers, float(config["timeout_s"]), int(config["memory_mb"]) << 20)


def _send(fd: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _serve(requests: int, answers: int, timeout_s: float, memory: int) -> None:
    buffer = bytearray()
    children: dict[int, tuple[int, int, bytes]] = {}  # the end of a child's pipe -> (pid, request, what it wrote)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            chunk = os.read(fd, 1 << 20)
            if fd == requests:
                if not chunk:
                    for pid, _, _ in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                buffer += chunk
                while (request := _take(buffer)) is not None:
                    end, pid = _fork(*request, timeout_s, memory)
                    children[end] = (pid, request[0]["id"], b"")
                    poll.register(end, select.POLLIN)
            else:
                pid, number, written = children[fd]
                children[fd] = (pid, number, written + chunk)
                if not chunk:
                    poll.unregister(fd)
                    os.close(fd)
                    del children[fd]
                    _, status = os.waitpid(pid, 0)
                    _send(answers, {"id": number} | (json.loads(written) if written and status == 0 else _died(status)))


def _take(buffer: bytearray) -> tuple[dict[str, Any], bytes] | None:
    """The next request and its bytes, removed from the buffer; None where it isn't there in full."""
    end = buffer.find(b"\n")
    if end < 0:
        return None
    request = json.loads(buffer[:end])
    stop = end + 1 + request["size"]
    if len(buffer) < stop:
        return None
    data = bytes(buffer[end + 1 : stop])
    del buffer[:stop]
    return request, data


def _died(status: int) -> dict[str, Any]:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return {"fault": "the time limit was reached" if name == "SIGALRM" else f"the process was killed by {name}"}
    return {"fault": f"the process ended with code {os.waitstatus_to_exitcode(status)} and no answer"}


def _fork(request: dict[str, Any], data: bytes, timeout_s: float, memory: int) -> tuple[int, int]:
    """Starts a child on a request; (the end of the pipe to read its answer from, its pid)."""
    reference, fault = None, ""
    try:
        spec = request["spec"]
        stamps = tuple(os.stat(spec[name]).st_mtime_ns for name in ("answers", "sample"))
        reference = _reference(json.dumps(spec), stamps)
    except Exception as error:  # unreadable answers: ours, and no reason to stop serving other competitions
        fault = f"{type(error).__name__}: {error}"[:_DETAIL]
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return read, pid
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills, wherever the child hangs
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        _send(write, {"fault": fault} if fault else _grade(data, reference))
    finally:
        os._exit(0)


@functools.lru_cache(maxsize=128)
def _reference(spec: str, stamps: tuple[int, ...]) -> Any:
    """A competition's answers, read again when a file has changed."""
    from sandbox.grade import GradeSpec
    from sandbox.submission import grade, load_reference

    reference = load_reference(GradeSpec(**json.loads(spec)))
    if reference.metric is not None:
        grade(reference.sample, reference)  # scikit-learn's first call is slow; children inherit that it has been made
    return reference


def _grade(data: bytes, reference: Any) -> dict[str, Any]:
    from sandbox.submission import grade

    try:
        result = grade(data, reference)
    except BaseException as error:  # SystemExit of a grade function included
        return {"fault": f"{type(error).__name__}: {error}"[:_DETAIL]}
    return {"score": result.score, "valid": result.valid, "reason": result.reason.name, "flags": result.flags}
