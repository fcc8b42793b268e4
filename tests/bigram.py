"""A policy and a critic that are tables over the previous token: every gradient can be worked out by hand."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxrl_code.types import Batch


@dataclasses.dataclass(frozen=True)
class Bigram:
    """Quacks like models.qwen2.Model: logits_V = table[previous token], or value = table[previous token]."""

    vocab: int
    head: str = "lm"

    def init(self, key: jax.Array, scale: float = 0.5) -> dict:
        shape = (self.vocab, self.vocab) if self.head == "lm" else (self.vocab,)
        return {"table": scale * jax.random.normal(key, shape)}

    def trunk(self, params, tokens_BT, valid_BT, cache=None):
        return params["table"][tokens_BT], None

    def logits(self, params, hidden):
        return hidden

    def apply(self, params, tokens_BT, valid_BT):
        return self.trunk(params, tokens_BT, valid_BT)[0]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def make_rows(rows, T: int, table=None, temperature: float = 1.0) -> Batch:
    """A Batch from ([(token, is_action)...], reward, duration[, truncated]) a row; old_logp from `table` if given."""
    B = len(rows)
    tokens = np.zeros((B, T), np.int32)
    flags = {name: np.zeros((B, T), bool) for name in ("valid_BT", "action_BT", "turn_end_BT")}
    reals = {name: np.zeros((B, T), np.float32) for name in ("old_logp_BT", "reward_BT", "duration_BT")}
    truncated = np.zeros(B, bool)
    for b, (pairs, reward, duration, *rest) in enumerate(rows):
        for t, (token, acted) in enumerate(pairs):
            tokens[b, t], flags["valid_BT"][b, t], flags["action_BT"][b, t] = token, True, acted
            if acted:
                reals["duration_BT"][b, t] = duration
                if table is not None:
                    logp = log_softmax(np.asarray(table)[pairs[t - 1][0]] / temperature)
                    reals["old_logp_BT"][b, t] = logp[token]
        if pairs:
            last = max(t for t, (_, acted) in enumerate(pairs) if acted)
            flags["turn_end_BT"][b, last], reals["reward_BT"][b, last] = True, reward
        truncated[b] = bool(rest and rest[0])
    return Batch(tokens_BT=tokens, truncated_B=truncated, **flags, **reals)
