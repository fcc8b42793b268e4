"""The embedded sampler: the JAX engine in a thread of its own behind the asyncio protocol."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

import numpy as np

from jaxrl_code.models.qwen2 import Model
from jaxrl_code.sampling.base import Completion, Request
from jaxrl_code.sampling.engine import MAX_STOP_IDS, Engine, Job
from jaxrl_code.types import Params

Command = tuple[Callable[[], None], Future]  # what the thread shall do, and the future to fail if it can't


def default_buckets(max_len: int) -> tuple[int, ...]:
    """Powers of two from 64 up to the context."""
    return (*(2**i for i in range(6, 31) if 2**i < max_len), max_len)


class LocalSampler:
    """`sampling.base.Sampler` in this process, on the devices that `params` lie on.

    `slots` sequences decode together, each of up to `max_len` tokens (prompt and answer); a prompt is padded to the
    smallest of `prompt_buckets`; every `decode_chunk` tokens finished sequences make room for waiting ones. The same
    request gives the same tokens and log-probs, bit for bit, for the same model, weights and these numbers.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        slots: int,
        max_len: int,
        prompt_buckets: tuple[int, ...] = (),
        decode_chunk: int = 16,
        version: int = 0,
    ) -> None:
        buckets = prompt_buckets or default_buckets(max_len)
        for name, value in (("slots", slots), ("max_len", max_len), ("decode_chunk", decode_chunk)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if slots % 8:
            # XLA's products take rows in tiles; those of a last, incomplete tile can come out with other bits.
            raise ValueError(f"slots = {slots} must be a multiple of 8, or answers depend on the slot they were given")
        if model.head != "lm":
            raise ValueError(f"the sampler needs a model with head 'lm', not {model.head!r}")
        if max_len > model.config.max_len:
            raise ValueError(f"max_len = {max_len} is beyond the model's {model.config.max_len}: lower it")
        if list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] > max_len:
            raise ValueError(f"prompt_buckets = {buckets} must increase, from 1 or more to max_len = {max_len} or less")
        self._engine = Engine(
            model, params, slots=slots, max_len=max_len, prompt_buckets=buckets, chunk=decode_chunk, version=version
        )
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: BaseException | None = None  # why nothing is served any more

    @property
    def version(self) -> int:
        """Of the weights that the next request will be sampled with, once the jobs in flight are done."""
        return self._engine.version

    @property
    def steps(self) -> int:
        """Decode steps so far, each of one token in every running slot."""
        return self._engine.steps

    def compiled(self) -> int:
        """Programs compiled for this model and these shapes: constant after `warmup`."""
        return self._engine.compiled()

    async def start(self) -> None:
        """Start the thread. Shapes are compiled when first used; `warmup` compiles them before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sampler", daemon=True)
            self._thread.start()

    async def warmup(self, truncated: bool = False) -> None:
        """Compile every shape; with `truncated`, those of top-p and top-k too."""
        await self._run(lambda: self._engine.warm_up(truncated))

    async def sample(self, request: Request) -> Completion:
        """Sample an answer; cancelling it gives the slot back. ValueError if it can never be served."""
        self._check(request)
        job = Job(request)
        self._post(lambda: self._engine.waiting.append(job), job.future)
        return await asyncio.wrap_future(job.future)

    async def update_weights(self, params: Params, version: int) -> None:
        """Copy `params` for all requests that have no slot yet; those that have one end under the old weights first."""
        self._engine.check_weights(params)
        await self._run(lambda: self._engine.set_weights(self._engine.copied(params), version))

    async def close(self) -> None:
        """Stop after the running chunk; requests that have not ended fail, and so do later ones."""
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    async def _run(self, command: Callable[[], None]) -> None:
        """Run `command` in the sampler's thread; what it raises is raised here and leaves the sampler running."""
        done: Future[None] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    command()
                except Exception as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)

        self._post(run, done)
        await asyncio.wrap_future(done)

    def _post(self, command: Callable[[], None], future: Future) -> None:
        if self._thread is None:
            raise RuntimeError("the sampler has not been started: await start() first")
        self._commands.put((command, future))
        if self._ended is not None:  # looked at after the put: the thread sets it before it fails what it finds queued
            self._fail(future)

    def _serve(self) -> None:
        """The thread: commands as they come, a step whenever there is work, and at the end nobody is left waiting."""
        try:
            while True:
                while not (self._engine.busy and self._commands.empty()):
                    command = self._commands.get()
                    if command is None:
                        raise RuntimeError("the sampler was closed")
                    command[0]()
                self._engine.step()
        except BaseException as error:
            self._ended = error
        for job in self._engine.jobs():
            self._fail(job.future)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                self._fail(command[1])

    def _fail(self, future: Future) -> None:
        with contextlib.suppress(InvalidStateError):  # resolved or cancelled already
            error = RuntimeError(f"the sampler has stopped: {self._ended}")
            error.__cause__ = self._ended
            future.set_exception(error)

    def _check(self, request: Request) -> None:
        params, prompt = request.params, np.asarray(request.prompt_ids)
        vocab_size, buckets, max_len = self._engine.model.config.vocab_size, self._engine.buckets, self._engine.max_len
        if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu":
            raise ValueError(
                f"prompt_ids must be a non-empty list of token ids, not {prompt.dtype}{list(prompt.shape)}"
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(f"prompt_ids must lie in [0, {vocab_size}): is this the model's own tokenizer?")
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens = {params.max_tokens} must be at least 1")
        if len(prompt) - 1 > buckets[-1]:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens is longer than the largest of prompt_buckets = {buckets}"
            )
        if len(prompt) + params.max_tokens > max_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens = {params.max_tokens} do not fit in the sampler's "
                f"max_len = {max_len}: shorten them or raise max_len"
            )
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise ValueError(f"temperature = {params.temperature} must be 0 (greedy) or positive")
        if not 0 < params.top_p <= 1:
            raise ValueError(f"top_p = {params.top_p} must be in (0, 1]; 1 is off")
        if params.top_k < 0:
            raise ValueError(f"top_k = {params.top_k} must be 0 (off) or positive")
        if len(params.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids = {params.stop_ids}: at most {MAX_STOP_IDS} are supported")
        if any(not 0 <= stop < vocab_size for stop in params.stop_ids):
            raise ValueError(f"stop_ids = {params.stop_ids} must lie in [0, {vocab_size})")
