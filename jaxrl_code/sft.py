"""Behaviour cloning: cross-entropy on answers, the stop token included, given their prompts.

Several answers share a prompt, which is read once: the answers' rows attend to its keys and values in a cache, as the
sampler's do. Prompts are most of the tokens and carry no loss, so this makes an epoch about twice as fast.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import struct

from jaxrl_code.models.cache import init_cache
from jaxrl_code.models.qwen2 import Model
from jaxrl_code.types import Params


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt with its generation header, and answers, each ending in the stop token."""

    prompt_ids: np.ndarray  # int32 [P]
    answers: tuple[np.ndarray, ...]  # int32 [A]


@struct.dataclass
class Batch:
    """G prompts without their last token, and B = G * answers rows: that token and an answer. Right-padded."""

    prompt_GS: jax.Array
    prompt_valid_GS: jax.Array
    tokens_BT: jax.Array
    valid_BT: jax.Array  # every valid token but a row's first is a target


@struct.dataclass
class State:
    params: Params
    opt: optax.OptState
    step: jax.Array


def make_batch(examples: Sequence[Example], prompt_length: int, answer_length: int) -> Batch:
    """ValueError for an example that is longer than the lengths, or for uneven numbers of answers."""
    answers = len(examples[0].answers)
    prompt_GS = np.zeros((len(examples), prompt_length), np.int32)
    prompt_valid_GS = np.zeros(prompt_GS.shape, bool)
    tokens_BT = np.zeros((len(examples) * answers, answer_length + 1), np.int32)
    valid_BT = np.zeros(tokens_BT.shape, bool)
    for g, example in enumerate(examples):
        if len(example.answers) != answers:
            raise ValueError(
                f"example {g} has {len(example.answers)} answers, the first has {answers}: give all as many"
            )
        read = example.prompt_ids[:-1]
        longest = max(len(ids) for ids in example.answers)
        if len(read) > prompt_length or longest > answer_length:
            raise ValueError(
                f"example {g} has {len(read)} prompt tokens and up to {longest} in an answer, "
                f"more than the batch's {prompt_length} and {answer_length}"
            )
        prompt_GS[g, : len(read)] = read
        prompt_valid_GS[g, : len(read)] = True
        for a, ids in enumerate(example.answers):
            row = g * answers + a
            tokens_BT[row, : len(ids) + 1] = [example.prompt_ids[-1], *ids]
            valid_BT[row, : len(ids) + 1] = True
    arrays: Any = (prompt_GS, prompt_valid_GS, tokens_BT, valid_BT)  # on the host until the step takes them
    return Batch(*arrays)


def batches(
    examples: Sequence[Example],
    rng: np.random.Generator,
    prompt_lengths: Sequence[int],
    answer_lengths: Sequence[int],
    tokens: int,
) -> Iterator[Batch]:
    """One pass in random order: examples of like lengths together, about `tokens` tokens a batch, padding included.

    Prompts and answers are padded to the smallest of the lengths that holds them.
    """
    waiting: dict[tuple[int, int, int], list[Example]] = {}
    for index in rng.permutation(len(examples)):
        example = examples[index]
        answers = len(example.answers)
        prompt = _bucket(len(example.prompt_ids) - 1, prompt_lengths, "prompt")
        answer = _bucket(max(len(ids) for ids in example.answers), answer_lengths, "answer")
        alike = waiting.setdefault((prompt, answer, answers), [])
        alike.append(example)
        if len(alike) == max(1, round(tokens / (prompt + answers * answer))):
            yield make_batch(alike, prompt, answer)
            alike.clear()
    # What is left over waits for the next pass: a batch of another shape would compile anew.


def _bucket(length: int, lengths: Sequence[int], what: str) -> int:
    fits = [n for n in lengths if n >= length]
    if not fits:
        raise ValueError(f"{what} of {length} tokens is longer than all of {what}_lengths = {tuple(lengths)}")
    return min(fits)


def loss_fn(params: Params, model: Model, batch: Batch, prompt_weight: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean negative log-likelihood of the answers' tokens, plus `prompt_weight` times that of the prompts' tokens.

    Prompts repeat names, so that predicting them teaches to copy: what a small model learns last from answers alone.
    """
    G, S = batch.prompt_GS.shape
    answers = batch.tokens_BT.shape[0] // G
    hidden_GSD, cache = model.trunk(
        params, batch.prompt_GS, batch.prompt_valid_GS, init_cache(model.config, G, S), fresh=True
    )
    cache = jax.tree.map(lambda x: jnp.repeat(x, answers, axis=int(x.ndim > 1)), cache)  # lengths have no layers
    hidden_BTD, _ = model.trunk(params, batch.tokens_BT[:, :-1], batch.valid_BT[:, :-1], cache)

    def nll(hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(params, hidden)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = (logits.argmax(-1) == targets) & mask
        return jnp.where(mask, losses, 0.0).sum() / mask.sum(), right.sum() / mask.sum()

    mask_BT = batch.valid_BT[:, 1:]
    loss, accuracy = nll(hidden_BTD, batch.tokens_BT[:, 1:], mask_BT)
    info = {"loss": loss, "accuracy": accuracy, "tokens": mask_BT.sum()}
    if prompt_weight:
        prompt_loss, _ = nll(hidden_GSD[:, :-1], batch.prompt_GS[:, 1:], batch.prompt_valid_GS[:, 1:])
        loss += prompt_weight * prompt_loss
        info["prompt_loss"] = prompt_loss
    return loss, info


def make_optimizer(lr: float, steps: int, warmup: int) -> optax.GradientTransformation:
    """Muon (https://kellerjordan.github.io/posts/muon) for the layers' matrices, Adam for the rest, cosine decay.

    A model of this size learns in about half of the steps that Adam alone takes. `lr` is Adam's.
    """
    matrices: Any = _matrices  # optax's annotation knows no function of our dict
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, steps, end_value=lr * 0.02)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            lambda step: 5 * schedule(step),
            adam_b2=0.98,
            adam_learning_rate=schedule,
            weight_decay=0.01,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def _matrices(params: Params) -> Params:
    """Which axes of each leaf are a matrix's rows and columns; None for what is no matrix. Axis 0 is the layer."""
    axes = {
        "q": (1, (2, 3)),
        "k": (1, (2, 3)),
        "v": (1, (2, 3)),
        "o": ((1, 2), 3),
        "gate": (1, 2),
        "up": (1, 2),
        "down": (1, 2),
    }

    def of(path: tuple[Any, ...], leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        name = path[-1].key
        return optax.contrib.MuonDimensionNumbers(*axes[name]) if name in axes else None

    return jax.tree_util.tree_map_with_path(of, params)


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "prompt_weight"), donate_argnames=("state",))
def update(
    state: State, batch: Batch, model: Model, optimizer: optax.GradientTransformation, prompt_weight: float
) -> tuple[State, dict[str, jax.Array]]:
    grads, info = jax.grad(loss_fn, has_aux=True)(state.params, model, batch, prompt_weight)
    updates, opt = optimizer.update(grads, state.opt, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    return State(params, opt, state.step + 1), info


def train(
    model: Model,
    params: Params,
    data: Iterator[Batch],
    *,
    steps: int,
    lr: float,
    warmup: int,
    prompt_weight: float = 0.3,
    show: Callable[[int, str, Params], None] = lambda step, text, params: print(text, flush=True),
    show_every: int = 50,
) -> Params:
    """`params` are donated. `show` gets the step, a line of means since it was last called, and the params by then."""
    optimizer = make_optimizer(lr, steps, warmup)
    state = State(params, jax.jit(optimizer.init)(params), jnp.zeros((), jnp.int32))
    start, infos = time.monotonic(), []
    for step in range(1, steps + 1):
        state, info = update(state, next(data), model, optimizer, prompt_weight)
        infos.append(info)
        if step % show_every == 0 or step == steps:
            means = {name: np.mean([float(info[name]) for info in infos]) for name in infos[0] if name != "tokens"}
            shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
            show(step, f"step {step}/{steps}  {shown}  {time.monotonic() - start:.0f} s", state.params)
            infos = []
    return state.params
