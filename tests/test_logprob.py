"""Chunked log-probs against the dense ones, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_code.models.logprob import action_logp_and_entropy, logp_and_entropy, token_logp_and_entropy
from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.types import Params

SHAPE = dict(vocab_size=37, width=16, ffw=24, layers=1, heads=2, kv_heads=1, head_dim=8, max_len=32)
TOKENS = jax.random.randint(jax.random.key(2), (3, 7), 0, 37)
HIDDEN = 3 * jax.random.normal(jax.random.key(3), (3, 7, 16))
HEAD = 0.4 * jax.random.normal(jax.random.key(5), (16, 37))


def dense(model: Model, params: Params, hidden_BTD: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    """The definition, written out over [B, T, V]."""
    logp_BTV = jax.nn.log_softmax(model.logits(params, hidden_BTD[:, :-1]) / temperature)
    logp_BT = jnp.take_along_axis(logp_BTV, TOKENS[:, 1:, None], axis=-1)[..., 0]
    entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
    return jnp.pad(logp_BT, ((0, 0), (1, 0))), jnp.pad(entropy_BT, ((0, 0), (1, 0)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 15, 10_000])  # one token a row at a time; uneven; everything
def test_chunks_equal_the_dense_reference_and_its_gradient(tied: bool, chunk: int) -> None:
    model = Model(Qwen2Config(**SHAPE, tied=tied))
    params = {"embed": HEAD.T} if tied else {"lm_head": HEAD}  # all that log-probs need of a policy
    weight_BT = jax.random.normal(jax.random.key(4), TOKENS.shape)

    def chunked(params: Params, hidden_BTD: jax.Array) -> jax.Array:
        logp_BT, entropy_BT = token_logp_and_entropy(model, params, hidden_BTD, TOKENS, 0.7, chunk=chunk)
        return (weight_BT * logp_BT + weight_BT**2 * entropy_BT).sum()

    def reference(params: Params, hidden_BTD: jax.Array) -> jax.Array:
        logp_BT, entropy_BT = dense(model, params, hidden_BTD, 0.7)
        return (weight_BT * logp_BT + weight_BT**2 * entropy_BT).sum()

    ours = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(params, HIDDEN)
    theirs = jax.jit(jax.value_and_grad(reference, argnums=(0, 1)))(params, HIDDEN)
    assert max(abs(leaf).max() for leaf in jax.tree.leaves(theirs[1])) > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), ours, theirs)


def test_log_probs_belong_to_the_token_and_the_first_has_none() -> None:
    model = Model(Qwen2Config(**SHAPE))
    params = {"embed": HEAD.T}
    logp_BT, entropy_BT = token_logp_and_entropy(model, params, HIDDEN, TOKENS, 1.0)
    for found, expected in zip((logp_BT, entropy_BT), dense(model, params, HIDDEN, 1.0), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert found.dtype == jnp.float32
        assert (found[:, 0] == 0).all()


def test_all_logits_at_once_never_exist() -> None:
    """The compiled gradient's scratch memory stays far under the float32 logits of the whole batch."""
    model = Model(Qwen2Config(**(SHAPE | {"vocab_size": 4096, "max_len": 4096})))
    params = {"embed": jax.ShapeDtypeStruct((4096, 16), jnp.float32)}
    B, T = 2, 1024
    hidden = jax.ShapeDtypeStruct((B, T, 16), jnp.float32)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def loss(params: Params, hidden_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        logp_BT, entropy_BT = token_logp_and_entropy(model, params, hidden_BTD, tokens_BT, 1.0, chunk=64)
        return (logp_BT + entropy_BT).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < B * T * 4096 * 4 / 4


def test_forbidden_tokens_are_no_nan_in_value_or_gradient() -> None:
    logits = jnp.array([[0.0, 1.0, -jnp.inf, 2.0], [-jnp.inf, -jnp.inf, -jnp.inf, 5.0]])
    tokens = jnp.array([1, 3])
    logp, entropy = logp_and_entropy(logits, tokens, 1.0)
    p = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    np.testing.assert_allclose(logp, [np.log(p[1]), 0], atol=1e-6)
    np.testing.assert_allclose(entropy, [-(p * np.log(p)).sum(), 0], atol=1e-6)
    grad = jax.grad(lambda x: sum(y.sum() for y in logp_and_entropy(x, tokens, 1.0)))(logits)
    assert np.isfinite(grad).all()
    assert (grad[logits == -jnp.inf] == 0).all()


def test_large_bfloat16_logits_keep_float32_precision() -> None:
    logits = jnp.array([300.0, 300.0, 298.0], jnp.bfloat16)
    logp, entropy = logp_and_entropy(logits, jnp.array(0), 2.0)
    p = np.exp([0, 0, -1.0]) / np.exp([0, 0, -1.0]).sum()
    np.testing.assert_allclose([logp, entropy], [np.log(p[0]), -(p * np.log(p)).sum()], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0, 0.0, -1])
def test_a_temperature_without_a_distribution_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature = .* must be above 0"):
        logp_and_entropy(jnp.zeros(3), jnp.array(0), temperature)


@pytest.mark.parametrize("chunk", [1, 9, 10_000])
def test_actions_alone_equal_all_tokens_and_their_gradient(chunk: int) -> None:
    model = Model(Qwen2Config(**SHAPE))
    # Two turns; nothing; t = 0, which has no past.
    action_BT = jnp.array([[0, 0, 1, 1, 0, 0, 1], [0] * 7, [1, 0, 0, 0, 0, 1, 0]], bool)
    mask_BT = action_BT.at[:, 0].set(False)

    def total(actions_only: bool, params: Params, hidden_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        if actions_only:
            pair = action_logp_and_entropy(model, params, hidden_BTD, TOKENS, action_BT, 0.7, chunk=chunk)
        else:
            pair = token_logp_and_entropy(model, params, hidden_BTD, TOKENS, 0.7)
        both = jnp.where(mask_BT, jnp.stack(pair), 0.0)
        return (both[0] + 0.3 * both[1] ** 2).sum(), jnp.stack(pair)

    grad = jax.value_and_grad(total, argnums=(1, 2), has_aux=True)
    (_, got), got_grad = grad(True, {"embed": HEAD.T}, HIDDEN)
    (_, want), want_grad = grad(False, {"embed": HEAD.T}, HIDDEN)
    np.testing.assert_allclose(got, jnp.where(mask_BT, want, 0.0), atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got_grad, want_grad)
