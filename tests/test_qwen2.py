"""What must not change a log-prob (padding, the cache, remat), and what must never be NaN."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_code.models.cache import KVCache, init_cache
from jaxrl_code.models.logprob import token_logp_and_entropy
from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.types import Params

CONFIG = Qwen2Config(
    vocab_size=61, width=24, ffw=40, layers=2, heads=4, kv_heads=2, head_dim=6, rope_theta=1e4, max_len=64
)
MODEL = Model(CONFIG)
# Jitted even where once would do: op by op, the CPU compiles each of a hundred ops on its own.
trunk = jax.jit(Model.trunk, static_argnums=0)
apply = jax.jit(Model.apply, static_argnums=0)


@jax.jit
def log_probs(tokens_BT: jax.Array, valid_BT: jax.Array) -> jax.Array:
    hidden_BTD, _ = MODEL.trunk(PARAMS, tokens_BT, valid_BT)
    return token_logp_and_entropy(MODEL, PARAMS, hidden_BTD, tokens_BT, 1.0, chunk=16)[0]


def make_params(model: Model) -> Params:
    """Weights of the size of trained ones (at 0.02 attention is flat and a wrong mask hardly shows), by numpy: jax
    would compile a random generator for each shape."""
    normal = np.random.default_rng(0).standard_normal
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * normal(leaf.shape), leaf.dtype), shapes)


PARAMS = make_params(MODEL)
TOKENS = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (3, 9)).astype(np.int32)
VALID = np.ones(TOKENS.shape, bool)


def padded(tokens_BT: np.ndarray, left: int, right: int) -> tuple[jax.Array, jax.Array]:
    """The rows between padding of arbitrary token ids, and where they are."""
    filler = np.random.default_rng(left + right)
    columns = tokens_BT.shape[1]
    out_BT = filler.integers(0, CONFIG.vocab_size, (len(tokens_BT), left + columns + right)).astype(np.int32)
    out_BT[:, left : left + columns] = tokens_BT
    valid_BT = np.zeros(out_BT.shape, bool)
    valid_BT[:, left : left + columns] = True
    return jnp.asarray(out_BT), jnp.asarray(valid_BT)


@pytest.mark.parametrize(("left", "right"), [(0, 23), (17, 0), (1, 3)])
def test_padding_changes_no_log_prob(left: int, right: int) -> None:
    bare_BT = log_probs(TOKENS, VALID)
    tokens_BT, valid_BT = padded(TOKENS, left, right)
    # The first token has no past, and with padding on its left its number means nothing.
    got_BT = log_probs(tokens_BT, valid_BT)[:, left + 1 : left + TOKENS.shape[1]]
    np.testing.assert_allclose(got_BT, bare_BT[:, 1:], atol=2e-5)


def test_rows_in_one_batch_do_not_see_each_other_or_their_future() -> None:
    logits_BTV = apply(MODEL, PARAMS, TOKENS, VALID)
    changed = TOKENS.copy()
    changed[0] = 0  # another row
    changed[1, 5:] = 0  # the future of row 1
    others_BTV = apply(MODEL, PARAMS, changed, VALID)
    np.testing.assert_array_equal(logits_BTV[2], others_BTV[2])
    np.testing.assert_array_equal(logits_BTV[1, :5], others_BTV[1, :5])
    assert abs(logits_BTV[1, 5:] - others_BTV[1, 5:]).max() > 0.1


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_row_of_padding_gives_no_nan_forward_or_backward(head: str) -> None:
    model = Model(CONFIG, head)
    params = make_params(model)
    valid_BT = jnp.asarray(VALID).at[1].set(False)
    out, grads = jax.jit(jax.value_and_grad(lambda p: model.apply(p, TOKENS, valid_BT).sum()))(params)
    assert np.isfinite(out)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("remat", ["full", pytest.param("dots", marks=pytest.mark.slow)])
def test_remat_changes_no_gradient(remat: str) -> None:
    def grads(config: Qwen2Config) -> Params:
        model = Model(config)
        return jax.jit(jax.grad(lambda p: model.apply(p, TOKENS, VALID).var()))(PARAMS)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        grads(CONFIG),
        grads(dataclasses.replace(CONFIG, remat=remat)),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16_computes_in_bfloat16_and_ends_in_float32(tied: bool) -> None:
    config = dataclasses.replace(CONFIG, tied=tied)
    params = make_params(Model(config))
    exact_BTV = apply(Model(config), params, TOKENS, VALID)
    half = Model(dataclasses.replace(config, dtype="bfloat16"))
    hidden_BTD, cache = trunk(half, params, TOKENS, VALID, init_cache(half.config, 3, 12))
    assert hidden_BTD.dtype == jnp.bfloat16
    assert cache is not None
    assert cache.k_LBKHS.dtype == jnp.bfloat16
    logits_BTV = half.logits(params, hidden_BTD)
    assert logits_BTV.dtype == jnp.float32
    difference = np.sqrt(np.mean(np.square(logits_BTV - exact_BTV)) / np.mean(np.square(exact_BTV)))
    assert 1e-4 < difference < 0.05  # bf16 has 8 bits: worse means that a norm or softmax ran in it


def test_every_param_matters() -> None:
    """A weight that is declared and not used would train to nothing, and sync to the sampler unseen."""
    model = Model(dataclasses.replace(CONFIG, tied=False))
    params = make_params(model)
    grads = jax.jit(jax.grad(lambda p: model.apply(p, TOKENS, VALID).var()))(params)
    # A key's bias shifts all scores of a query alike but for the rotation, so it counts for little, yet counts.
    assert all(abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
def test_works_without_jit() -> None:
    jitted_BTV = apply(MODEL, PARAMS, TOKENS, VALID)
    with jax.disable_jit():
        hidden_BTD, cache = MODEL.trunk(PARAMS, TOKENS, VALID, init_cache(CONFIG, 3, 12))
        logits_BTV = MODEL.logits(PARAMS, hidden_BTD)
    np.testing.assert_allclose(logits_BTV, jitted_BTV, atol=1e-5)
    assert cache is not None
    assert cache.length_B.tolist() == [9, 9, 9]


# The cache


def test_decoding_through_the_cache_equals_the_full_pass() -> None:
    full_BTD, _ = trunk(MODEL, PARAMS, TOKENS, VALID)
    cache = init_cache(CONFIG, 3, 12)
    hidden_BTD, cache = trunk(MODEL, PARAMS, TOKENS[:, :4], VALID[:, :4], cache)
    pieces = [hidden_BTD]
    for t in range(4, 9):
        hidden_BTD, cache = trunk(MODEL, PARAMS, TOKENS[:, t : t + 1], VALID[:, t : t + 1], cache)
        pieces.append(hidden_BTD)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), full_BTD, atol=2e-5)


def test_rows_of_different_lengths_advance_on_their_own() -> None:
    """Continuous batching: prefill two rows with padding, put them in slots with old keys, decode, one row resting."""
    lengths = (3, 6)
    tokens_BT, valid_BT = np.zeros((2, 6), np.int32), np.zeros((2, 6), bool)
    tokens_BT[0, 3:], valid_BT[0, 3:] = TOKENS[0, :3], True  # padded on the left
    tokens_BT[1], valid_BT[1] = TOKENS[1, :6], True
    _, rows = trunk(MODEL, PARAMS, tokens_BT, valid_BT, init_cache(CONFIG, 2, 8))
    assert rows is not None
    slots = init_cache(CONFIG, 4, 16)
    # What an earlier, longer sequence left behind must not be seen.
    slots = KVCache(slots.k_LBKHS + 50, slots.v_LBKSH + 50, slots.length_B + 11)
    cache = slots.insert(rows, jnp.asarray([2, 0]))
    assert cache.length_B.tolist() == [6, 11, 3, 11]
    untouched = cache

    got: dict[int, list[jax.Array]] = {0: [], 2: []}
    row_of = {2: (0, lengths[0]), 0: (1, lengths[1])}
    for step, active in enumerate([(0, 2), (2,), (0, 2)]):  # in the second step slot 0 rests
        tokens_B1, active_B1 = np.zeros((4, 1), np.int32), np.zeros((4, 1), bool)
        for slot in active:
            row, length = row_of[slot]
            tokens_B1[slot], active_B1[slot] = TOKENS[row, length + len(got[slot])], True
        hidden_B1D, cache = trunk(MODEL, PARAMS, tokens_B1, active_B1, cache)
        for slot in active:
            got[slot].append(hidden_B1D[slot, 0])
        assert np.isfinite(hidden_B1D).all(), step
    assert cache.length_B.tolist() == [8, 11, 6, 11]
    np.testing.assert_array_equal(cache.k_LBKHS[:, [1, 3]], untouched.k_LBKHS[:, [1, 3]])

    full_BTD, _ = trunk(MODEL, PARAMS, TOKENS, VALID)
    np.testing.assert_allclose(jnp.stack(got[2]), full_BTD[0, 3:6], atol=2e-5)
    np.testing.assert_allclose(jnp.stack(got[0]), full_BTD[1, 6:8], atol=2e-5)


def test_a_slot_past_the_end_is_not_inserted_and_a_full_row_drops_what_does_not_fit() -> None:
    _, rows = trunk(MODEL, PARAMS, TOKENS[:1, :4], VALID[:1, :4], init_cache(CONFIG, 1, 4))
    assert rows is not None
    cache = init_cache(CONFIG, 2, 4)
    assert cache.insert(rows, jnp.asarray([2])).length_B.tolist() == [0, 0]
    _, over = trunk(MODEL, PARAMS, TOKENS[:1, :2], VALID[:1, :2], rows)
    assert over is not None
    np.testing.assert_array_equal(over.k_LBKHS, rows.k_LBKHS)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "heads = 3 must be a multiple of kv_heads = 2"),
        ({"head_dim": 5}, "head_dim = 5 must be even"),
        ({"layers": 0}, "layers = 0 must be at least 1"),
        ({"dtype": "float16"}, "dtype = 'float16' must be"),
        ({"param_dtype": "int8"}, "param_dtype = 'int8' must be"),
        ({"remat": "all"}, "remat = 'all' must be one of"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_an_unknown_head_and_a_cache_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="head = 'reward' must be one of"):
        Model(CONFIG, "reward")
    with pytest.raises(ValueError, match="cache length 65 must be between 1 and the model's max_len 64"):
        init_cache(CONFIG, 1, 65)
