from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_code.models.layers import attention, attention_by_head


def as_cache(q, k, v, mask):
    """The same attention through the general form, a query at a time: the first half of the keys lie in a cache."""
    half = k.shape[1] // 2
    cached = k[:, :half].transpose(0, 2, 3, 1), v[:, :half].transpose(0, 2, 1, 3)

    def one(q, mask):
        return attention(q, (k[:, half:], v[:, half:], mask[..., half:]), (*cached, mask[..., :half]))

    return jnp.concatenate([one(q[:, t : t + 1], mask[:, t : t + 1]) for t in range(q.shape[1])], axis=1)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_by_head_equals_the_general_form_and_its_gradient(dtype, tolerance):
    B, T, N, K, H = 2, 10, 4, 2, 8
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, T, N, H), dtype)
    k, v = (jax.random.normal(key, (B, T, K, H), dtype) for key in keys[1:])
    valid = jnp.arange(T) >= jnp.array([[0], [4]])  # left padding: its queries see nothing at all
    mask = jnp.tril(jnp.ones((T, T), bool)) & valid[:, None, :]

    def loss(fn, q, k, v):
        out = jnp.where(valid[:, :, None, None], fn(q, k, v, mask), 0).astype(jnp.float32)
        return (out**2).sum(), out

    (_, want), want_grad = jax.value_and_grad(loss, (1, 2, 3), has_aux=True)(as_cache, q, k, v)
    (_, got), got_grad = jax.value_and_grad(loss, (1, 2, 3), has_aux=True)(attention_by_head, q, k, v)
    np.testing.assert_allclose(got, want, atol=tolerance)
    for a, b in zip(got_grad, want_grad, strict=True):
        scale = np.abs(np.asarray(b, np.float32)).max()
        np.testing.assert_allclose(np.asarray(a, np.float32) / scale, np.asarray(b, np.float32) / scale, atol=tolerance)
    assert np.isfinite(np.asarray(attention_by_head(q, k, v, mask), np.float32)).all()
