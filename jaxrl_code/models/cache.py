"""The KV cache: an ordinary argument of the trunk, one row a sequence, each row with its own length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct

if TYPE_CHECKING:
    from jaxrl_code.models.qwen2 import Qwen2Config


@struct.dataclass
class KVCache:
    """Keys and values without holes: row b holds its tokens 0 .. length_B[b] - 1, in order, and slot = position.

    Padding is never stored, so what lies beyond the length is garbage that nothing looks at: a slot is reused by
    setting its length to 0 (or by `insert`), without clearing it.
    """

    k_LBKHS: jax.Array  # transposed: XLA's CPU products are several times slower if they must transpose it each step
    v_LBKSH: jax.Array
    length_B: jax.Array  # int32

    def append(self, k_LBTKH: jax.Array, v_LBTKH: jax.Array, valid_BT: jax.Array) -> KVCache:
        """Write each row's valid tokens behind what it holds. What doesn't fit is dropped: the caller checks."""
        S = self.v_LBKSH.shape[3]
        rows_B1 = jnp.arange(valid_BT.shape[0])[:, None]
        slots_BT = jnp.where(valid_BT, self.length_B[:, None] + jnp.cumsum(valid_BT, axis=1) - 1, S)
        # Two index arrays with a slice between them put the indexed axes first: [B, T, L, K, H].
        k_BTLKH, v_BTLKH = (jnp.moveaxis(x, 0, 2).astype(self.v_LBKSH.dtype) for x in (k_LBTKH, v_LBTKH))
        return KVCache(
            k_LBKHS=self.k_LBKHS.at[:, rows_B1, :, :, slots_BT].set(k_BTLKH, mode="drop"),
            v_LBKSH=self.v_LBKSH.at[:, rows_B1, :, slots_BT].set(v_BTLKH, mode="drop"),
            length_B=self.length_B + valid_BT.sum(axis=1, dtype=jnp.int32),
        )

    def insert(self, rows: KVCache, slots_R: jax.Array) -> KVCache:
        """Put the rows of a (shorter or equal) prefilled cache into these slots; a slot >= B is dropped."""
        S = rows.v_LBKSH.shape[3]
        return KVCache(
            k_LBKHS=self.k_LBKHS.at[:, slots_R, :, :, :S].set(rows.k_LBKHS, mode="drop"),
            v_LBKSH=self.v_LBKSH.at[:, slots_R, :, :S].set(rows.v_LBKSH, mode="drop"),
            length_B=self.length_B.at[slots_R].set(rows.length_B, mode="drop"),
        )


def init_cache(config: Qwen2Config, batch: int, length: int) -> KVCache:
    """An empty cache for `batch` rows of up to `length` tokens, in the compute dtype."""
    if not 0 < length <= config.max_len:
        raise ValueError(f"cache length {length} must be between 1 and the model's max_len {config.max_len}")
    L, K, H = config.layers, config.kv_heads, config.head_dim
    return KVCache(
        k_LBKHS=jnp.zeros((L, batch, K, H, length), config.dtype),
        v_LBKSH=jnp.zeros((L, batch, K, length, H), config.dtype),
        length_B=jnp.zeros((batch,), jnp.int32),
    )
