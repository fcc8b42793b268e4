"""Behaviour cloning: which tokens are learned, the shared prompt, and that it learns."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_code import sft
from jaxrl_code.models.qwen2 import Model, Qwen2Config

MODEL = Model(Qwen2Config(vocab_size=32, width=16, ffw=32, layers=2, heads=2, kv_heads=1, head_dim=8, max_len=64))
loss = jax.jit(sft.loss_fn, static_argnames=("model", "prompt_weight"))
apply = jax.jit(MODEL.apply)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


EXAMPLES = (
    sft.Example(ids(5, 6, 7), (ids(1, 2, 3), ids(4, 3))),
    sft.Example(ids(8, 9, 10, 11, 12), (ids(2, 2, 2, 3), ids(1, 3))),
)


def test_a_row_is_the_prompts_last_token_and_an_answer():
    batch = sft.make_batch(EXAMPLES, prompt_length=6, answer_length=4)
    np.testing.assert_array_equal(batch.prompt_GS, [[5, 6, 0, 0, 0, 0], [8, 9, 10, 11, 0, 0]])
    np.testing.assert_array_equal(batch.prompt_valid_GS.sum(axis=1), [2, 4])
    np.testing.assert_array_equal(
        batch.tokens_BT, [[7, 1, 2, 3, 0], [7, 4, 3, 0, 0], [12, 2, 2, 2, 3], [12, 1, 3, 0, 0]]
    )
    np.testing.assert_array_equal(batch.valid_BT.sum(axis=1), [4, 3, 5, 3])
    assert batch.valid_BT[:, 0].all()  # right-padded


def test_the_loss_is_that_of_the_answers_tokens_after_the_whole_prompt():
    params = MODEL.init(jax.random.key(0))
    mean, info = loss(params, MODEL, sft.make_batch(EXAMPLES, prompt_length=6, answer_length=4), 0.0)
    total, count = 0.0, 0
    for example in EXAMPLES:
        for answer in example.answers:
            row_1T = np.concatenate([example.prompt_ids, answer])[None]
            logp_1TV = jax.nn.log_softmax(apply(params, row_1T, np.ones(row_1T.shape, bool)))
            first = len(example.prompt_ids)
            total -= sum(float(logp_1TV[0, first + i - 1, token]) for i, token in enumerate(answer))
            count += len(answer)
    assert int(info["tokens"]) == count == 11
    assert float(mean) == pytest.approx(total / count, rel=1e-5)


def test_padding_and_company_change_nothing():
    params = MODEL.init(jax.random.key(0))
    wide = loss(params, MODEL, sft.make_batch(EXAMPLES[:1], prompt_length=20, answer_length=9), 0.0)[0]
    narrow = loss(params, MODEL, sft.make_batch(EXAMPLES[:1], prompt_length=2, answer_length=3), 0.0)[0]
    assert float(wide) == pytest.approx(float(narrow), rel=1e-5)


def test_the_prompt_is_learned_from_through_its_keys_and_values():
    model = Model(dataclasses.replace(MODEL.config, tied=False))  # or every embedding gets a gradient from the softmax
    batch = sft.make_batch(EXAMPLES[1:], prompt_length=4, answer_length=4)
    grads = jax.jit(jax.grad(lambda p: sft.loss_fn(p, model, batch, 0.0)[0]))(model.init(jax.random.key(0)))
    touched = np.flatnonzero(abs(grads["embed"]).max(axis=1))
    np.testing.assert_array_equal(touched, [1, 2, 8, 9, 10, 11, 12])  # 3 ends every answer: nothing follows it


def test_prompts_can_be_learned_as_well():
    params, batch = MODEL.init(jax.random.key(0)), sft.make_batch(EXAMPLES[:1], prompt_length=4, answer_length=3)
    _, info = loss(params, MODEL, batch, 0.5)
    logp_1TV = jax.nn.log_softmax(apply(params, ids(5, 6)[None], np.ones((1, 2), bool)))
    assert float(info["prompt_loss"]) == pytest.approx(-float(logp_1TV[0, 0, 6]), rel=1e-5)
    total = loss(params, MODEL, batch, 0.5)[0]
    assert float(total) == pytest.approx(float(info["loss"] + 0.5 * info["prompt_loss"]), rel=1e-5)


def test_batches_are_full_of_like_lengths_and_in_an_order_of_their_own():
    rng = np.random.default_rng(0)
    examples = [sft.Example(np.full(n, 1, np.int32), (ids(2, 3),) * 2) for n in rng.integers(2, 17, size=40)]
    seen = list(sft.batches(examples, np.random.default_rng(1), (8, 16), (4,), tokens=48))
    shapes = {batch.prompt_GS.shape for batch in seen}
    assert shapes == {(3, 8), (2, 16)}  # 48 / (8 + 2 * 4) and 48 / (16 + 2 * 4)
    again = list(sft.batches(examples, np.random.default_rng(1), (8, 16), (4,), tokens=48))
    assert all((a.prompt_valid_GS == b.prompt_valid_GS).all() for a, b in zip(seen, again, strict=True))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"5 tokens is longer.*prompt_lengths = \(4,\)"):
        next(sft.batches([sft.Example(np.ones(6, np.int32), (ids(1),))], np.random.default_rng(0), (4,), (4,), 100))
    with pytest.raises(ValueError, match="up to 4 in an answer"):
        sft.make_batch(EXAMPLES, prompt_length=6, answer_length=3)
    with pytest.raises(ValueError, match="give all as many"):
        sft.make_batch([EXAMPLES[0], sft.Example(ids(1, 2), (ids(1),))], 6, 4)


def test_it_learns_what_follows_which_prompt():
    batch = sft.make_batch(EXAMPLES, prompt_length=6, answer_length=4)
    lines: list[str] = []
    params = sft.train(
        MODEL,
        MODEL.init(jax.random.key(0)),
        iter([batch] * 200),
        steps=200,
        lr=5e-3,
        warmup=5,
        show=lambda step, text, params: lines.append(text),
    )
    left, _ = loss(params, MODEL, batch, 0.0)
    # Each prompt has two answers: ln 2 a prompt is left, over 11 tokens in all.
    floor = 4 * np.log(2) / 11
    assert floor - 1e-3 < float(left) < floor + 0.05
    assert lines[-1].startswith("step 200/200")
