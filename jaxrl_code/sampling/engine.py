"""Continuous batching over a KV cache: prompts are prefilled one by one into free slots, all slots decode together.

What a request returns depends on nothing but itself and the weights, bit for bit, whichever slot it gets and whatever
runs beside it: its prefill is a program of its own, padded to a bucket that only its length chooses; decoding has one
shape, in which a row never looks at another; its random numbers come from its seed and its token count.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_code.models.cache import KVCache
from jaxrl_code.models.qwen2 import Model
from jaxrl_code.sampling.base import Completion, Request, SamplingParams
from jaxrl_code.sampling.programs import Rows, programs
from jaxrl_code.types import Params

MAX_STOP_IDS = 8
KEPT_PROMPTS = 4  # prefilled prompts kept for the next request with the same one


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way. Cancelling the future gives the slot back."""

    request: Request
    future: Future[Completion] = dataclasses.field(default_factory=Future)
    ids: list[int] = dataclasses.field(default_factory=list)
    logp: list[np.float32] = dataclasses.field(default_factory=list)

    @property
    def truncated(self) -> bool:
        return self.request.params.top_p < 1 or self.request.params.top_k > 0


class Engine:
    """Scheduling of jobs over the slots. Everything that changes it belongs to one thread."""

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        slots: int,
        max_len: int,
        prompt_buckets: tuple[int, ...],
        chunk: int,
        version: int,
    ) -> None:
        self.model, self.max_len, self.buckets, self.chunk = model, max_len, prompt_buckets, chunk
        sharding = jax.tree.leaves(params)[0].sharding
        self._programs = programs(
            model, slots, max_len, chunk, sharding.mesh if isinstance(sharding, NamedSharding) else None
        )
        self.version, self.steps = version, 0
        self._params = self.copied(params)
        self._next: tuple[Params, int] | None = None  # weights that wait for the jobs in flight
        self._cache = self._programs.new_cache()
        self._slots: list[Job | None] = [None] * slots
        self._truncated = False  # which of the two decode programs the jobs in flight use
        self._prompts: collections.OrderedDict[bytes, KVCache] = collections.OrderedDict()
        self.waiting: collections.deque[Job] = collections.deque()
        self._rows = Rows(
            token_B=np.zeros(slots, np.int32),
            count_B=np.zeros(slots, np.int32),
            max_B=np.zeros(slots, np.int32),
            stop_BX=np.full((slots, MAX_STOP_IDS), -1, np.int32),
            seed_B2=np.zeros((slots, 2), np.uint32),
            temperature_B=np.ones(slots, np.float32),
            top_p_B=np.ones(slots, np.float32),
            top_k_B=np.zeros(slots, np.int32),
            active_B=np.zeros(slots, bool),
        )

    @property
    def busy(self) -> bool:
        return self._next is not None or bool(self.waiting) or self._running()

    def jobs(self) -> list[Job]:
        """All that have not ended."""
        return [job for job in self._slots if job is not None] + list(self.waiting)

    def compiled(self) -> int:
        return self._programs.compiled()

    def check_weights(self, params: Params) -> None:
        """ValueError unless these are params of the same model."""

        def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
            return {jax.tree_util.keystr(path): x.shape for path, x in jax.tree.leaves_with_path(tree)}

        ours, theirs = shapes(self._params), shapes(params)
        wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if wrong:
            raise ValueError(
                f"params{wrong[0]} is {theirs.get(wrong[0])}, the sampler's model has {ours.get(wrong[0])}"
            )

    def copied(self, params: Params) -> Params:
        """A copy in the compute dtype, finished when this returns."""
        return jax.block_until_ready(self._programs.copy(params))

    def set_weights(self, params: Params, version: int) -> None:
        """Use `params`, the engine's own from now on, once the jobs in flight are done; no job starts before."""
        self._next = (params, version)

    def warm_up(self, truncated: bool) -> None:
        """Compile every shape, with no job running, and check that the slots compute the same bits."""
        assert not self.busy
        self.copied(self._params)  # once more: this thread may have another mesh set than the one that made the engine
        for bucket in self.buckets:
            row = self._programs.prefill(self._params, np.zeros(bucket, np.int32), np.int32(0))
            self._cache = self._programs.insert(self._cache, row, np.int32(0))
        if truncated:
            self._truncated = True
            self._decode()
        prompt = np.arange(min(self.buckets[-1], self.max_len - self.chunk), dtype=np.int32)
        probe = Request(prompt % self.model.config.vocab_size, SamplingParams(self.chunk, ()), seed=0)
        jobs = [Job(probe) for _ in self._slots]
        self.waiting.extend(jobs)
        while self.busy:
            self.step()
        if len({job.future.result().logp.tobytes() for job in jobs}) > 1:
            warnings.warn(
                f"the log-probs of a request depend on its slot here: with slots = {len(jobs)}, a resumed run will not "
                "repeat an uninterrupted one exactly. Another number of slots (16, 32, 64...) may",
                RuntimeWarning,
                stacklevel=1,
            )
        self._prompts.clear()
        self.steps = 0

    def step(self) -> None:
        """Fill the free slots, decode a chunk, resolve what has ended."""
        for slot, job in enumerate(self._slots):
            if job is not None and job.future.cancelled():
                self._release(slot)
        if self._next is not None and not self._running():
            self._params, self.version = self._next
            self._next = None
            self._prompts.clear()
        if self._next is None:
            self._admit()
        if not self._running():
            return
        tokens_IB, logp_IB = self._decode()
        for slot, job in enumerate(self._slots):
            if job is not None:
                self._collect(slot, job, tokens_IB[:, slot], logp_IB[:, slot])

    def _running(self) -> bool:
        return any(job is not None for job in self._slots)

    def _release(self, slot: int) -> None:
        self._slots[slot] = None
        self._rows.active_B[slot] = False

    def _admit(self) -> None:
        """First come, first served. Jobs that truncate and jobs that don't never mix: their programs differ."""
        for slot in [slot for slot, job in enumerate(self._slots) if job is None]:
            while self.waiting and self.waiting[0].future.cancelled():
                self.waiting.popleft()
            if not self.waiting:
                return
            if not self._running():
                self._truncated = self.waiting[0].truncated
            if self.waiting[0].truncated != self._truncated:
                return
            self._start(slot, self.waiting.popleft())

    def _start(self, slot: int, job: Job) -> None:
        """Prefill all of the prompt but its last token, which the first decode step reads."""
        prompt, params, seed = np.asarray(job.request.prompt_ids), job.request.params, job.request.seed % 2**64
        row = self._prompts.pop(prompt.tobytes(), None)
        if row is None:
            tokens_P = np.zeros(min(bucket for bucket in self.buckets if bucket >= len(prompt) - 1), np.int32)
            tokens_P[: len(prompt) - 1] = prompt[:-1]
            row = self._programs.prefill(self._params, tokens_P, np.int32(len(prompt) - 1))
        self._prompts[prompt.tobytes()] = row
        if len(self._prompts) > KEPT_PROMPTS:
            self._prompts.popitem(last=False)
        self._cache = self._programs.insert(self._cache, row, np.int32(slot))
        self._slots[slot] = job
        rows = self._rows
        rows.token_B[slot], rows.count_B[slot], rows.max_B[slot] = prompt[-1], 0, params.max_tokens
        rows.stop_BX[slot] = -1
        rows.stop_BX[slot, : len(params.stop_ids)] = params.stop_ids
        rows.seed_B2[slot] = seed >> 32, seed & 0xFFFFFFFF
        rows.temperature_B[slot], rows.top_p_B[slot], rows.top_k_B[slot] = (
            params.temperature,
            params.top_p,
            params.top_k,
        )
        rows.active_B[slot] = True

    def _decode(self) -> tuple[np.ndarray, np.ndarray]:
        program = self._programs.decode_truncated if self._truncated else self._programs.decode
        # The host's arrays change while the device may still read them: hand over copies.
        rows = jax.tree.map(np.copy, self._rows)
        self._cache, tokens_IB, logp_IB, steps = program(self._params, self._cache, rows)
        tokens_IB, logp_IB, steps = jax.device_get((tokens_IB, logp_IB, steps))
        self.steps += int(steps)
        return tokens_IB, logp_IB

    def _collect(self, slot: int, job: Job, tokens_I: np.ndarray, logp_I: np.ndarray) -> None:
        count = int(np.sum(tokens_I >= 0))
        if not np.isfinite(logp_I[:count]).all():
            raise FloatingPointError(f"log-probs are not finite: the weights of version {self.version} are broken")
        job.ids += tokens_I[:count].tolist()
        job.logp += list(logp_I[:count])
        params = job.request.params
        stopped = job.ids[-1] in params.stop_ids
        if stopped or len(job.ids) == params.max_tokens:
            self._release(slot)
            if job.future.set_running_or_notify_cancel():
                ids, logp = np.array(job.ids, np.int32), np.array(job.logp, np.float32)
                job.future.set_result(Completion(ids, logp, "stop" if stopped else "length", self.version))
            return
        self._rows.token_B[slot], self._rows.count_B[slot] = job.ids[-1], len(job.ids)
