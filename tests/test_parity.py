"""The same numbers as transformers: against stored logits everywhere, against live torch where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_code.models import hf
from jaxrl_code.models.cache import init_cache
from jaxrl_code.models.qwen2 import Model
from jaxrl_code.types import Params

SHAPES = tuple(golden_models.SHAPES)


def our_logits(folder: Path, tokens_BT: np.ndarray, remat: str = "none") -> np.ndarray:
    config, params = hf.load(folder, remat=remat)
    apply = jax.jit(Model(config).apply)
    return np.asarray(apply(params, jnp.asarray(tokens_BT), jnp.ones(tokens_BT.shape, bool)))


def their_logits(folder: Path, tokens_BT: np.ndarray, kind: str = "AutoModelForCausalLM") -> np.ndarray:
    import torch
    import transformers

    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(tokens_BT).long()).logits.numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_parity_with_stored_logits(name: str, tmp_path: Path) -> None:
    golden = np.load(golden_models.GOLDENS / f"{name}.npz")
    ours = our_logits(golden_models.write(name, tmp_path), golden["tokens_BT"])
    assert abs(golden["logits_BTV"]).max() > 1  # the golden says something
    np.testing.assert_allclose(ours, golden["logits_BTV"], rtol=0, atol=1e-4)


@pytest.mark.torch
@pytest.mark.filterwarnings("default")  # torch's and transformers' own
@pytest.mark.parametrize("name", SHAPES)
def test_parity_with_live_transformers_both_ways(name: str, tmp_path: Path) -> None:
    folder, tokens_BT = golden_models.write(name, tmp_path / "theirs"), golden_models.tokens(name)
    theirs = their_logits(folder, tokens_BT)
    np.testing.assert_allclose(our_logits(folder, tokens_BT), theirs, rtol=0, atol=1e-4)
    np.testing.assert_allclose(theirs, np.load(golden_models.GOLDENS / f"{name}.npz")["logits_BTV"], rtol=0, atol=1e-4)

    config, params = hf.load(folder)
    params = jax.tree.map(lambda leaf: leaf + np.float32(0.01), params)  # our own weights, saved by us in many shards
    hf.save(tmp_path / "ours", config, params, shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    saved = their_logits(tmp_path / "ours", tokens_BT)
    assert abs(saved - theirs).max() > 0.1
    np.testing.assert_allclose(our_logits(tmp_path / "ours", tokens_BT), saved, rtol=0, atol=1e-4)


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
def test_parity_of_a_saved_critic(tmp_path: Path) -> None:
    config, params = hf.load(golden_models.write("gqa_tied", tmp_path / "policy"))
    critic = hf.critic_from_policy(params)
    critic["value_head"] = {"kernel": jax.random.normal(jax.random.key(0), (config.width,)), "bias": jnp.float32(0.3)}
    hf.save(tmp_path / "critic", config, critic)
    tokens_BT = golden_models.tokens("gqa_tied")
    values_BT = Model(config, "value").apply(critic, jnp.asarray(tokens_BT), jnp.ones(tokens_BT.shape, bool))
    theirs = their_logits(tmp_path / "critic", tokens_BT, "AutoModelForTokenClassification")[..., 0]
    np.testing.assert_allclose(values_BT, theirs, rtol=0, atol=1e-4)


def greedy(model: Model, params: Params, prompt_ids: list[int], steps: int) -> list[int]:
    """Prefill, then one token at a time through the cache."""

    @jax.jit
    def step(params: Params, tokens_BT: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        hidden_BTD, cache = model.trunk(params, tokens_BT, jnp.ones(tokens_BT.shape, bool), cache)
        return model.logits(params, hidden_BTD[:, -1]).argmax(-1)[:, None], cache

    cache = init_cache(model.config, 1, len(prompt_ids) + steps)
    token_B1, cache = step(params, jnp.asarray([prompt_ids]), cache)
    ids = [int(token_B1[0, 0])]
    while len(ids) < steps:
        token_B1, cache = step(params, token_B1, cache)
        ids.append(int(token_B1[0, 0]))
    return ids


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.real_weights
@pytest.mark.filterwarnings("default")
def test_parity_on_real_weights(real_model: Path) -> None:
    """Logits to 2e-3 in float32, and 64 greedy tokens equal: theirs with their cache, ours with ours."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    messages = [{"role": "user", "content": "Write a Python program that trains a classifier on train.csv."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(text)["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    with torch.no_grad():
        logits_TV = theirs(torch.tensor([prompt_ids])).logits[0].numpy()
        out = theirs.generate(
            torch.tensor([prompt_ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False, repetition_penalty=1.0
        )
    their_ids = out[0, len(prompt_ids) :].tolist()
    del theirs

    config, host = hf.load(real_model)
    params = jax.device_put(host)
    model = Model(config)
    tokens_BT = jnp.asarray([prompt_ids])
    ours_TV = np.asarray(jax.jit(model.apply)(params, tokens_BT, jnp.ones(tokens_BT.shape, bool))[0])
    difference = abs(ours_TV - logits_TV).max()
    print(f"largest logit {abs(logits_TV).max():.1f}, largest difference {difference:.2e}")
    assert difference < 2e-3
    assert greedy(model, params, prompt_ids, 64) == their_ids
