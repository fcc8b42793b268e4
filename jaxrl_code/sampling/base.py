"""The sampler's protocol: token ids in, token ids with log-probs out, weights replaced between requests."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from jaxrl_code.types import Params


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample. top_p = 1 and top_k = 0 (off) are required in training: anything else changes the distribution
    that the log-probs belong to."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    prompt_ids: np.ndarray  # int32 [P]
    params: SamplingParams
    seed: int  # the same prompt, seed, params and weights give the same tokens, whatever else is in flight


@dataclasses.dataclass(frozen=True)
class Completion:
    ids: np.ndarray  # int32 [A], the stop token included
    logp: np.ndarray  # float32 [A], log-softmax(logits / temperature) at the sampled token
    stop_reason: str  # 'stop' or 'length'
    version: int  # of the policy that sampled it


class Sampler(Protocol):
    async def start(self) -> None: ...

    async def sample(self, request: Request) -> Completion:
        """Raises ValueError for a request that can never be served (longer than the context, top_k < 0...)."""
        ...

    async def update_weights(self, params: Params, version: int) -> None:
        """Later requests use these weights. `params` may be donated by the learner afterwards: nothing is aliased."""
        ...

    async def close(self) -> None: ...
