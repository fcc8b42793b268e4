"""The embedded sampler: determinism, log-probs against a full forward, distribution, scheduling, faults."""

from __future__ import annotations

import asyncio
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_code.models.logprob import token_logp_and_entropy
from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.sampling.base import Request, SamplingParams
from jaxrl_code.sampling.local import LocalSampler, default_buckets
from jaxrl_code.sampling.programs import truncate
from jaxrl_code.sharding import make_mesh, shardings_for

VOCAB = 96
MODEL = Model(Qwen2Config(vocab_size=VOCAB, width=48, ffw=96, layers=2, heads=6, kv_heads=2, head_dim=8, max_len=128))


def make_params(model, seed=0):
    """Larger than at initialisation, so that distributions are far from uniform and errors show."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        return jnp.array(rng.normal("norm" in jax.tree_util.keystr(path), 0.15, x.shape), x.dtype)

    return jax.tree.map_with_path(leaf, jax.eval_shape(model.init, jax.random.key(0)))


@pytest.fixture(scope="module")
def params():
    return make_params(MODEL)


@contextlib.asynccontextmanager
async def sampler(params, model=MODEL, **kwargs):
    kwargs = {"slots": 8, "max_len": 128, "prompt_buckets": (32, 64), "decode_chunk": 8} | kwargs
    served = LocalSampler(model, params, **kwargs)
    await served.start()
    try:
        yield served
    finally:
        await served.close()


def prompt(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32)


def request(length=10, seed=0, max_tokens=40, stop_ids=(), **kwargs):
    return Request(prompt(length, seed), SamplingParams(max_tokens, stop_ids, **kwargs), seed)


def assert_same(a, b):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.logp.view(np.int32), b.logp.view(np.int32))  # bit for bit
    assert a.stop_reason == b.stop_reason


# ---- determinism


@pytest.mark.parametrize("slots", [8, 16])
async def test_a_request_returns_the_same_bits_whatever_runs_beside_it(params, slots):
    rng = np.random.default_rng(slots)
    requests = [
        request(int(rng.integers(1, 60)), i, int(rng.integers(1, 50)), (3, 5), temperature=float(t))
        for i, t in enumerate(rng.choice([0.0, 0.7, 1.0], 24))
    ]
    async with sampler(params, slots=slots) as served:
        alone = [await served.sample(r) for r in requests]  # always in the first slot
        for _ in range(2):
            order = rng.permutation(len(requests))

            async def later(i, delay):
                await asyncio.sleep(delay)
                return await served.sample(requests[i])

            together = await asyncio.gather(*(later(i, rng.uniform(0, 0.05)) for i in order))
            for i, completion in zip(order, together, strict=True):
                assert_same(alone[i], completion)


async def test_every_slot_computes_the_same_bits(params):
    async with sampler(params, slots=16) as served:
        same = await asyncio.gather(*(served.sample(request(33, 7)) for _ in range(16)))
        for completion in same[1:]:
            assert_same(same[0], completion)
        other = await served.sample(Request(prompt(33, 7), SamplingParams(40, ()), 8))
        assert not np.array_equal(other.ids, same[0].ids)  # another seed is another answer


async def test_chunk_length_and_a_fresh_sampler_change_nothing(params):
    requests = [request(20, i) for i in range(5)]
    results = []
    for chunk in (1, 8):
        async with sampler(params, decode_chunk=chunk) as served:
            results.append(await asyncio.gather(*map(served.sample, requests)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)


# ---- agreement with the learner, and with the distribution


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
async def test_logp_equals_a_full_forward_pass(temperature, tied):
    model = Model(Qwen2Config(VOCAB, 48, 96, 2, 6, 2, 8, tied=tied, max_len=128))
    params = make_params(model)
    requests = [request(length, length, 60, (4,), temperature=temperature) for length in (1, 2, 17, 33, 34, 64)]
    async with sampler(params, model) as served:
        completions = await asyncio.gather(*map(served.sample, requests))
    tokens_BT, valid_BT = np.zeros((6, 128), np.int32), np.zeros((6, 128), bool)
    for b, (r, c) in enumerate(zip(requests, completions, strict=True)):
        ids = np.concatenate([r.prompt_ids, c.ids])
        tokens_BT[b, : len(ids)], valid_BT[b, : len(ids)] = ids, True

    @jax.jit
    def learner(params, tokens_BT, valid_BT):
        hidden_BTD, _ = model.trunk(params, tokens_BT, valid_BT)
        return token_logp_and_entropy(model, params, hidden_BTD, tokens_BT, temperature)[0]

    logp_BT = np.asarray(learner(params, tokens_BT, valid_BT))
    for b, (r, c) in enumerate(zip(requests, completions, strict=True)):
        start = len(r.prompt_ids)
        np.testing.assert_allclose(c.logp, logp_BT[b, start : start + len(c.ids)], atol=1e-4, rtol=0)
        assert c.ids.dtype == np.int32 and c.logp.dtype == np.float32


async def test_greedy_follows_the_argmax(params):
    async with sampler(params) as served:
        completion = await served.sample(request(12, 1, 30, temperature=0.0))
    ids = np.concatenate([prompt(12, 1), completion.ids])
    logits_TV = jax.jit(MODEL.apply)(params, ids[None], np.ones((1, len(ids)), bool))[0, 11:-1]
    np.testing.assert_array_equal(completion.ids, jnp.argmax(logits_TV, axis=-1))
    np.testing.assert_allclose(completion.logp, jax.nn.log_softmax(logits_TV).max(axis=-1), atol=1e-4)


def chi2(counts, prob):
    """Statistic over its standard deviation from the mean, cells of few expected counts pooled."""
    expected = prob * counts.sum()
    rare = expected < 5
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert not observed[~keep].any()
    free = keep.sum() - 1
    return (np.sum((observed - expected)[keep] ** 2 / expected[keep]) - free) / np.sqrt(2 * free)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 5), (0.7, 20)])
async def test_samples_follow_the_softmax_at_the_temperature(params, top_p, top_k):
    n, ids = 3000, prompt(9)
    sampling = SamplingParams(1, (), 0.7, top_p, top_k)
    async with sampler(params) as served:
        completions = await asyncio.gather(*(served.sample(Request(ids, sampling, seed)) for seed in range(n)))
    logits_V = np.asarray(jax.jit(MODEL.apply)(params, ids[None], np.ones((1, 9), bool))[0, -1], np.float64)
    prob_V = np.exp(logits_V / 0.7 - np.max(logits_V / 0.7))
    full_V = prob_V / prob_V.sum()
    kept_V = full_V.copy()
    order = np.argsort(-full_V)
    if top_k:
        kept_V[order[top_k:]] = 0
    kept_V /= kept_V.sum()
    if top_p < 1:
        kept_V[order[np.searchsorted(np.cumsum(kept_V[order]), top_p) + 1 :]] = 0
    kept_V /= kept_V.sum()
    counts_V = np.bincount([c.ids[0] for c in completions], minlength=VOCAB)
    assert abs(chi2(counts_V, kept_V)) < 4
    assert chi2(counts_V, np.full(VOCAB, 1 / VOCAB)) > 20 or top_k or top_p < 1
    # Log-probs are of the whole distribution, truncated or not.
    for c in completions[:50]:
        np.testing.assert_allclose(c.logp[0], np.log(full_V[c.ids[0]]), atol=1e-4)


def test_later_tokens_of_one_request_are_independent_draws():
    """Under a uniform model, tokens must be independent along a sequence and between two seeds."""
    model = Model(Qwen2Config(16, 16, 16, 1, 2, 1, 8, tied=False, max_len=2048))
    params = jax.tree.map(jnp.zeros_like, make_params(model))  # uniform
    served = LocalSampler(model, params, slots=8, max_len=2048, prompt_buckets=(8,), decode_chunk=512)

    async def main():
        await served.start()
        requests = [Request(np.array([1], np.int32), SamplingParams(1500, ()), seed) for seed in range(4)]
        completions = await asyncio.gather(*map(served.sample, requests))
        await served.close()
        return np.stack([c.ids for c in completions])

    tokens_BT = asyncio.run(main())
    pairs = np.bincount((tokens_BT[:, :-1] * 16 + tokens_BT[:, 1:]).ravel(), minlength=256)
    assert abs(chi2(pairs, np.full(256, 1 / 256))) < 4
    across = np.bincount(tokens_BT[0] * 16 + tokens_BT[1], minlength=256)
    assert abs(chi2(across, np.full(256, 1 / 256))) < 4


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, {0, 1, 2, 3}),
        (1.0, 1, {1}),
        (1.0, 2, {1, 3}),
        (1.0, 99, {0, 1, 2, 3}),
        (0.49, 0, {1}),
        (0.51, 0, {1, 3}),
        (0.79, 0, {1, 3}),
        (0.81, 0, {1, 2, 3}),
        (1e-9, 0, {1}),
        (0.6, 2, {1}),  # of the two kept, the first has 0.5 / 0.8
        (0.63, 2, {1, 3}),
    ],
)
def test_truncate_keeps_exactly_the_nucleus(top_p, top_k, kept):
    logits_V = jnp.log(jnp.array([0.05, 0.5, 0.15, 0.3]))
    out_V = np.asarray(truncate(logits_V, jnp.float32(top_p), jnp.int32(top_k)))
    assert set(np.flatnonzero(np.isfinite(out_V))) == kept
    np.testing.assert_array_equal(out_V[sorted(kept)], np.asarray(logits_V)[sorted(kept)])


# ---- stopping


async def test_the_first_stop_id_ends_the_answer_and_is_kept(params):
    async with sampler(params) as served:
        free = await served.sample(request(10, 3, 60))
        assert free.stop_reason == "length" and len(free.ids) == 60
        distinct = list(dict.fromkeys(free.ids.tolist()))
        early, late = distinct[9], distinct[-1]
        cut = free.ids.tolist().index(early)
        for stop_ids in ((early,), (late, early), (early, late)):
            stopped = await served.sample(request(10, 3, 60, stop_ids))
            assert stopped.stop_reason == "stop"
            np.testing.assert_array_equal(stopped.ids, free.ids[: cut + 1])
            np.testing.assert_array_equal(stopped.logp, free.logp[: cut + 1])
        # A stop id as the last token allowed is still 'stop'; one token less is 'length'.
        assert (await served.sample(request(10, 3, cut + 1, (early,)))).stop_reason == "stop"
        assert (await served.sample(request(10, 3, cut, (early,)))).stop_reason == "length"
        assert len((await served.sample(request(10, 3, 1))).ids) == 1


# ---- scheduling


async def test_one_long_answer_does_not_hold_the_batch(params):
    async with sampler(params) as served:
        long = asyncio.create_task(served.sample(request(5, 99, 96)))
        short = [served.sample(request(5, i, 8)) for i in range(84)]
        finished = await asyncio.gather(*short)
        assert all(len(c.ids) == 8 for c in finished)
        assert len((await long).ids) == 96
        # 84 answers of one chunk in the seven other slots take the 12 chunks that the long one takes alone.
        assert 96 <= served.steps <= 96 + 8


async def test_the_batch_stops_early_when_all_rows_have_ended(params):
    async with sampler(params, decode_chunk=64) as served:
        await asyncio.gather(*(served.sample(request(5, i, 3)) for i in range(2)))
        assert served.steps in (3, 6)  # together, or one after the other


async def test_nothing_is_compiled_after_warmup(params):
    async with sampler(params, decode_chunk=4) as served:
        await served.warmup(truncated=True)
        compiled = served.compiled()
        requests = [
            request(length, length, 3 + length % 9, (1, 2), temperature=temperature, top_k=top_k, top_p=top_p)
            for length in (1, 31, 32, 33, 34, 64, 65)
            for temperature, top_k, top_p in ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.5, 7, 1.0), (1.0, 7, 0.7))
        ]
        await asyncio.gather(*map(served.sample, requests))
        await served.update_weights(jax.tree.map(lambda x: x + 0, params), 1)
        await asyncio.gather(*map(served.sample, requests))
        assert served.compiled() == compiled


async def test_cancelling_gives_the_slot_back(params):
    async with sampler(params, decode_chunk=1) as served:
        calls = [asyncio.create_task(served.sample(request(5, i, 120))) for i in range(12)]  # four of them queued
        while not served.steps:
            await asyncio.sleep(0.005)
        for call in calls:
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        completion = await served.sample(request(5, 2, 4))
        assert len(completion.ids) == 4
        assert served.steps < 100
        assert_same(completion, await served.sample(request(5, 2, 4)))


async def test_the_event_loop_stays_free(params):
    async with sampler(params, decode_chunk=64) as served:
        worst, task = 0.0, asyncio.gather(*(served.sample(request(40, i, 64)) for i in range(16)))
        while not task.done():
            before = asyncio.get_running_loop().time()
            await asyncio.sleep(0.001)
            worst = max(worst, asyncio.get_running_loop().time() - before)
        assert worst < 0.5  # compiling takes longer than that


# ---- weights


async def test_new_weights_serve_later_requests_and_never_alias(params):
    other = jax.tree.map(lambda x: x * 0.5, params)
    async with sampler(params) as served:
        before = await served.sample(request(20, 1))
        assert before.version == 0
        donated = jax.tree.map(jnp.copy, other)
        await served.update_weights(donated, 3)
        theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(donated)}
        for leaf in jax.tree.leaves(donated):
            leaf.delete()  # what donation does
        after = await served.sample(request(20, 1))
        assert after.version == 3
        assert not theirs & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(served._engine._params)}
        assert not np.array_equal(after.logp, before.logp)
        await served.update_weights(params, 4)
        back = await served.sample(request(20, 1))
        assert_same(before, back)
        assert back.version == 4
    async with sampler(other) as fresh:
        assert_same(after, await fresh.sample(request(20, 1)))


async def test_every_leaf_of_the_weights_reaches_the_sampler(params):
    """The prompt is the same: a prefilled cache of the old weights would show as an unchanged leaf."""
    async with sampler(params) as served:
        before = await served.sample(request(20, 1, 3))
        leaves, tree = jax.tree.flatten(params)
        for i in range(len(leaves)):
            noisy = np.asarray(leaves[i]) + np.random.default_rng(i).normal(0, 1, leaves[i].shape).astype(np.float32)
            await served.update_weights(tree.unflatten([*leaves[:i], jnp.array(noisy), *leaves[i + 1 :]]), i)
            after = await served.sample(request(20, 1, 3))
            assert not np.array_equal(after.logp, before.logp)


async def test_requests_in_flight_end_under_the_old_weights(params):
    async with sampler(params, decode_chunk=1) as served:
        alone = await served.sample(request(20, 1, 60))
        running = asyncio.create_task(served.sample(request(20, 1, 60)))
        steps = served.steps
        while served.steps < steps + 3:
            await asyncio.sleep(0.001)
        await served.update_weights(jax.tree.map(lambda x: x * 0.5, params), 1)
        assert not running.done()
        new = await served.sample(request(20, 1, 2))
        assert new.version == 1 and running.done()
        old = await running
        assert old.version == 0
        assert_same(alone, old)


# ---- faults


async def test_bad_requests_are_clear_errors(params):
    good = prompt(5)
    async with sampler(params) as served:
        for sampling, ids, message in [
            (SamplingParams(10, ()), np.zeros(0, np.int32), "non-empty"),
            (SamplingParams(10, ()), np.zeros((1, 3), np.int32), "non-empty"),
            (SamplingParams(10, ()), np.zeros(3), "float64"),
            (SamplingParams(10, ()), np.array([VOCAB], np.int32), "tokenizer"),
            (SamplingParams(10, ()), np.array([-1], np.int32), "tokenizer"),
            (SamplingParams(10, ()), prompt(66), "prompt_buckets"),
            (SamplingParams(124, ()), good, "max_len = 128"),
            (SamplingParams(0, ()), good, "max_tokens = 0"),
            (SamplingParams(10, (), -0.1), good, "temperature"),
            (SamplingParams(10, (), float("nan")), good, "temperature"),
            (SamplingParams(10, (), 1.0, 0.0), good, "top_p"),
            (SamplingParams(10, (), 1.0, 1.0, -1), good, "top_k"),
            (SamplingParams(10, (VOCAB,)), good, "stop_ids"),
            (SamplingParams(10, tuple(range(9))), good, "at most 8"),
        ]:
            with pytest.raises(ValueError, match=message):
                await served.sample(Request(ids, sampling, 0))
        assert len((await served.sample(Request(good, SamplingParams(123, ()), -5))).ids) == 123
        with pytest.raises(ValueError, match="embed"):
            await served.update_weights({**params, "embed": jnp.zeros((3, 3))}, 1)
    for kwargs, message in [
        ({"slots": 0}, "slots = 0"),
        ({"slots": 13}, "slots = 13 must be a multiple of 8"),
        ({"max_len": 129}, "max_len = 129"),
        ({"prompt_buckets": (64, 32)}, "increase"),
        ({"prompt_buckets": (256,)}, "increase"),
        ({"model": Model(MODEL.config, "value")}, "'lm'"),
    ]:
        with pytest.raises(ValueError, match=message):
            async with sampler(params, **kwargs):
                pass


async def test_a_failing_engine_fails_all_requests_and_later_ones(params, monkeypatch):
    async with sampler(params) as served:
        calls = [asyncio.create_task(served.sample(request(5, i, 90))) for i in range(20)]

        def broken():
            raise OSError("device lost")

        await asyncio.sleep(0)
        monkeypatch.setattr(served._engine, "step", broken)
        async with asyncio.timeout(30):
            for call in calls:
                with pytest.raises(RuntimeError, match="device lost"):
                    await call
            with pytest.raises(RuntimeError, match="device lost"):
                await served.sample(request())
            with pytest.raises(RuntimeError, match="device lost"):
                await served.update_weights(params, 1)


async def test_broken_weights_are_an_error_not_a_sample(params):
    async with sampler(params) as served:
        await served.update_weights(jax.tree.map(lambda x: x * jnp.nan, params), 7)
        with pytest.raises(RuntimeError, match="version 7 are broken"):
            await served.sample(request())


async def test_closing_fails_what_has_not_ended(params):
    served = LocalSampler(MODEL, params, slots=8, max_len=128, prompt_buckets=(32, 64), decode_chunk=1)
    with pytest.raises(RuntimeError, match="start"):
        await served.sample(request())
    await served.start()
    calls = [asyncio.create_task(served.sample(request(5, i, 120))) for i in range(20)]
    while not served.steps:
        await asyncio.sleep(0.005)
    await served.close()
    async with asyncio.timeout(30):
        for call in calls:
            with pytest.raises(RuntimeError, match="closed"):
                await call
        with pytest.raises(RuntimeError, match="closed"):
            await served.sample(request())
    await served.close()


# ---- sharding and dtypes


@pytest.mark.parametrize(("fsdp", "tp"), [(4, 2), (8, 1)])
async def test_sharded_params_sample_the_same(params, fsdp, tp):
    mesh = make_mesh(fsdp, tp)
    requests = [request(20 + i, i, 12) for i in range(10)]
    sharded = jax.device_put(params, shardings_for(mesh, params))
    async with sampler(params) as served:
        expected = await asyncio.gather(*map(served.sample, requests))
    async with sampler(sharded) as served:
        await served.warmup()
        compiled = served.compiled()
        got = await asyncio.gather(*map(served.sample, requests))
        await served.update_weights(sharded, 1)
        again = await asyncio.gather(*map(served.sample, requests[::-1]))
        assert served.compiled() == compiled
    for want, have, repeat in zip(expected, got, again[::-1], strict=True):
        np.testing.assert_array_equal(want.ids, have.ids)
        np.testing.assert_allclose(want.logp, have.logp, atol=1e-4)
        assert_same(have, repeat)


async def test_bfloat16_weights_are_kept_in_bfloat16(params):
    model = Model(Qwen2Config(VOCAB, 48, 96, 2, 6, 2, 8, max_len=128, dtype="bfloat16"))
    async with sampler(params, model) as served:
        assert {x.dtype.name for x in jax.tree.leaves(served._engine._params)} == {"bfloat16"}
        completions = await asyncio.gather(*(served.sample(request(20, i)) for i in range(9)))
        assert_same(completions[8], await served.sample(request(20, 8)))
        ids = np.concatenate([prompt(20, 8), completions[8].ids])
    logits_TV = jax.jit(model.apply)(params, ids[None], np.ones((1, len(ids)), bool))[0]
    logp_T = jax.nn.log_softmax(logits_TV)[np.arange(19, len(ids) - 1), completions[8].ids]
    assert np.abs(completions[8].logp - logp_T).mean() < 0.05


def test_default_buckets_end_at_the_context():
    assert default_buckets(300) == (64, 128, 256, 300)
    assert default_buckets(64) == (64,)


async def test_warmup_tells_when_slots_compute_different_bits(params, monkeypatch):
    async with sampler(params) as served:
        decode = served._engine._decode

        def slot_dependent():
            tokens_IB, logp_IB = decode()
            return tokens_IB, logp_IB + np.float32(1e-6) * (np.arange(8, dtype=np.float32) == 5)

        monkeypatch.setattr(served._engine, "_decode", slot_dependent)
        with pytest.warns(RuntimeWarning, match="depend on its slot"):
            await served.warmup()
