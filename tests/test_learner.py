from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import Bigram, log_softmax, make_rows

from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.ppo.config import PPOConfig
from jaxrl_code.ppo.learner import LearnerState, init, make_logp, make_optimizer, make_update, state_shardings
from jaxrl_code.sharding import make_mesh

V, T = 8, 7
POLICY, CRITIC = Bigram(V), Bigram(V, "value")
# A large epsilon makes Adam's step depend on the size of a gradient: with a small one a wrong size would pass.
CONFIG = PPOConfig(actor_lr=0.01, critic_lr=0.01, temperature=0.7, micro_rows=4, adam_eps=0.1, grad_clip=0.5)
SHUFFLED = dataclasses.replace(CONFIG, minibatches=2, micro_rows=2, epochs=2, entropy=0.01, lam=0.9)
ENTROPY = dataclasses.replace(CONFIG, entropy=0.1)
no, yes = False, True
# Prompt 1 2, observation 5, prompts of other rows 6 and 7: token 0 is also the padding.
ROWS = (
    ([(1, no), (2, no), (3, yes), (4, yes), (5, no), (6, yes)], 1.0, 1.0),
    ([(1, no), (2, no), (3, yes), (3, yes)], -10.0, 2.0),
    ([(7, no), (2, no), (0, yes), (4, yes), (0, yes)], 0.75, 4.0, yes),
    ([(7, no), (6, no), (4, yes)], 0.0, 1.0),
)


def tables(seed: int = 0) -> tuple[dict, dict]:
    a, c = jax.random.split(jax.random.key(seed))
    return POLICY.init(a), CRITIC.init(c, 0.1)


def fresh(config: PPOConfig = CONFIG, seed: int = 0) -> LearnerState:
    return init(jax.random.key(seed), *tables(), config)


def batch_of(rows=ROWS, length: int = T, temperature: float = 0.7):
    return make_rows(rows, length, tables()[0]["table"], temperature)


@functools.cache
def update_for(config: PPOConfig = CONFIG):
    return make_update(POLICY, CRITIC, config)  # type: ignore[arg-type]


def step(config: PPOConfig = CONFIG, batch=None, **kw) -> tuple[LearnerState, dict[str, float]]:
    state, info = update_for(config)(fresh(config), batch_of() if batch is None else batch, **kw)
    return state, {name: float(x) for name, x in info.items()}


def assert_same(a: LearnerState, b: LearnerState, atol: float = 1e-6) -> None:
    for name in ("actor", "critic"):
        np.testing.assert_allclose(getattr(a, name)["table"], getattr(b, name)["table"], atol=atol, err_msg=name)


def slow_first_step(config: PPOConfig, rows) -> tuple[np.ndarray, np.ndarray]:
    """One optimizer step of both tables from their analytic gradients, by loops."""
    actor, critic = (np.asarray(p["table"], np.float64) for p in tables())
    shift = np.mean([reward for _, reward, *_ in rows])
    slots, durations = [], []  # (previous, token, value in units, return in units, raw advantage, duration)
    for pairs, reward, duration, *rest in rows:
        acted = [t for t, (_, own) in enumerate(pairs) if own]
        last_value = shift + config.value_scale * critic[pairs[-1][0]] if rest and rest[0] else 0.0
        durations.append(duration)
        for t in acted:  # gamma = lam = 1: the return is the reward, plus the bootstrap
            value = critic[pairs[t - 1][0]]
            ret = reward + last_value
            adv = ret - (shift + config.value_scale * value)
            slots.append((pairs[t - 1][0], pairs[t][0], value, (ret - shift) / config.value_scale, adv, duration))
    adv = np.array([s[4] for s in slots])
    adv = (adv - adv.mean()) / np.sqrt(adv.var() + 1e-6)
    if config.duration == "linear":
        adv = adv * np.array([s[5] for s in slots]) / np.mean(durations)
    grad_actor, grad_critic = np.zeros_like(actor), np.zeros_like(critic)
    for (prev, token, value, ret, _, _), a in zip(slots, adv, strict=True):
        p = np.exp(log_softmax(actor[prev] / config.temperature))
        grad_actor[prev] -= a * (np.eye(V)[token] - p) / config.temperature / len(slots)
        grad_critic[prev] += (value - ret) / len(slots)

    def adam(table, grad, lr):
        grad = grad * min(1.0, config.grad_clip / np.sqrt((grad**2).sum()))
        return table - lr * grad / (np.abs(grad) + config.adam_eps)

    return adam(actor, grad_actor, config.actor_lr), adam(critic, grad_critic, config.critic_lr)


@pytest.mark.parametrize("duration", ["none", "linear"])
def test_first_step_equals_the_slow_version(duration):
    config = dataclasses.replace(CONFIG, duration=duration)
    state, _ = step(config)
    actor, critic = slow_first_step(config, ROWS)
    np.testing.assert_allclose(state.actor["table"], actor, atol=1e-6)
    np.testing.assert_allclose(state.critic["table"], critic, atol=1e-6)


def test_golden_step():
    state, info = step(SHUFFLED)
    got = [float(jnp.abs(state.actor["table"]).sum()), float(jnp.abs(state.critic["table"]).sum())]
    np.testing.assert_allclose(got, GOLDEN[:2], rtol=1e-5)
    np.testing.assert_allclose([info["actor/entropy"], info["critic/value_loss"]], GOLDEN[2:], rtol=1e-4)


GOLDEN = (30.401558, 0.8309523, 1.878983, 0.3136500)


def test_ratio_is_one_at_the_first_step_at_any_temperature():
    _, info = step()
    assert info["actor/ratio_mean"] == 1.0 and info["actor/kl_old"] == 0.0
    assert info["rollout/logp_diff_max"] < 1e-5  # the sampler's log-probs are at 0.7 too
    _, info = step(batch=batch_of(temperature=1.0))
    assert info["rollout/logp_diff_max"] > 0.01  # and a sampler at another temperature shows


def test_only_sampled_tokens_are_trained_the_first_one_included():
    state, _ = step(ENTROPY)
    moved = np.abs(np.asarray(state.actor["table"] - tables()[0]["table"])).max(axis=1) > 0
    trained_from = {2, 3, 5, 6, 0, 4}  # 2 -> 3 is a first generated token; 4 -> 0 is an action in the third row
    assert set(np.flatnonzero(moved)) == trained_from  # 1 and 7 are only ever followed by prompt tokens
    values = np.abs(np.asarray(state.critic["table"] - tables()[1]["table"])) > 0
    assert set(np.flatnonzero(values)) == trained_from


def test_an_observation_token_is_not_trained():
    rows = [([(1, no), (3, yes), (4, no), (5, no), (token, yes)], r, 1.0) for token, r in ((6, 1.0), (7, 0.0))]
    state, _ = step(batch=batch_of(rows * 2))
    moved = np.abs(np.asarray(state.actor["table"] - tables()[0]["table"])).max(axis=1) > 0
    assert moved[5] and not moved[3] and not moved[4]


@pytest.mark.parametrize("micro_rows, lengths", [(2, ()), (1, (3, 5, 99))])
def test_any_micro_batch_split_and_cut_gives_the_same_step(micro_rows, lengths):
    want, want_info = step()
    got, info = step(dataclasses.replace(CONFIG, micro_rows=micro_rows, lengths=lengths))
    assert_same(got, want)
    for name in ("actor/policy_loss", "critic/value_loss", "actor/grad_norm", "critic/grad_norm", "actor/entropy"):
        np.testing.assert_allclose(info[name], want_info[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_row_order_does_not_matter():
    want, _ = step()
    got, _ = step(batch=jax.tree.map(lambda x: x[np.array([2, 0, 3, 1])], batch_of()))
    assert_same(got, want)


def test_padding_invalid_rows_and_garbage_at_masked_slots_do_not_matter():
    want, _ = step()
    wide = batch_of((*ROWS, *[([], 0.0, 0.0)] * 4), length=T + 5)
    dirt = {
        name: np.where(wide.action_BT, getattr(wide, name), np.nan)
        for name in ("old_logp_BT", "reward_BT", "duration_BT")
    }
    dirt["tokens_BT"] = np.where(wide.valid_BT, wide.tokens_BT, 5)
    got, info = step(batch=wide.replace(**dirt))
    assert_same(got, want)
    assert all(np.isfinite(x) for x in info.values())


def test_a_batch_of_faults_alone_is_no_step():
    state, info = step(batch=batch_of([([], 0.0, 0.0)] * 4))
    want = fresh()
    np.testing.assert_array_equal(state.actor["table"], want.actor["table"])
    np.testing.assert_array_equal(state.critic["table"], want.critic["table"])
    jax.tree.map(np.testing.assert_array_equal, state.actor_opt, want.actor_opt)
    assert info["actor/skipped"] == info["critic/skipped"] == 1 and int(state.step) == 1
    assert not state.value_known and all(np.isfinite(x) for x in info.values())


def test_a_gradient_that_is_not_finite_is_not_taken():
    batch = batch_of()
    batch.reward_BT[0, 5] = np.inf
    state, info = step(batch=batch)
    assert np.isfinite(state.actor["table"]).all() and np.isfinite(state.critic["table"]).all()
    assert info["actor/skipped"] == info["critic/skipped"] == 1


FLAT = tuple((pairs, 1.0, 1.0) for pairs, *_ in ROWS)  # equal rewards


def still_step(config: PPOConfig = CONFIG, **kw):
    """A step in which no advantage pulls: equal rewards, and a critic that knows them."""
    actor, critic = tables()
    state = init(jax.random.key(0), actor, {"table": jnp.zeros_like(critic["table"])}, config)
    return update_for(config)(state, batch_of(FLAT), **kw)


def test_coefficients_of_zero_are_zero_and_others_have_a_gradient():
    before = tables()[0]["table"]
    reference = {"table": before + jnp.eye(V)}
    ref_logp = make_logp(POLICY, CONFIG)(reference, batch_of(FLAT))  # type: ignore[arg-type]
    state, info = still_step(ref_logp_BT=ref_logp)
    np.testing.assert_array_equal(state.actor["table"], before)
    assert info["actor/kl_ref"] > 0  # watched, not paid for
    state, _ = still_step(ENTROPY)
    assert np.abs(state.actor["table"] - before).max() > 0
    config = dataclasses.replace(CONFIG, kl=0.1)
    state, info = still_step(config, ref_logp_BT=ref_logp)
    _, later = update_for(config)(state, batch_of(FLAT), ref_logp_BT=ref_logp)
    assert later["actor/kl_ref"] < info["actor/kl_ref"]


def test_kl_without_a_reference_is_an_error():
    with pytest.raises(ValueError, match=r"ppo.kl=0.1"):
        step(dataclasses.replace(CONFIG, kl=0.1))


def test_clip_of_zero_stops_whatever_has_moved_its_way():
    _, info = step(dataclasses.replace(CONFIG, clip=0.0, epochs=4))
    assert info["actor/clip_frac"] > 0.2


def test_the_sampler_s_log_probs_only_count_when_asked_for():
    want, _ = step()
    odd = batch_of()
    odd = odd.replace(old_logp_BT=np.where(odd.action_BT, odd.old_logp_BT - 1.0, 0).astype(np.float32))
    assert_same(step(batch=odd)[0], want, atol=0)
    got, info = step(dataclasses.replace(CONFIG, behaviour_cap=2.0), odd)
    np.testing.assert_allclose(info["actor/behaviour_weight_mean"], 2.0)  # e > 2: truncated
    assert np.abs(np.asarray(got.actor["table"] - want.actor["table"])).max() > 1e-4
    odd.old_logp_BT[0, 2] = np.nan
    _, info = step(batch=odd)
    assert info["rollout/logp_unknown"] == 1 and np.isfinite(info["actor/policy_loss"])


def test_partial_rewards_and_the_bootstrap_reach_the_returns():
    row = [(1, no), (2, no), (3, yes)]
    _, info = step(batch=batch_of([(row, 0.75, 1.0)] * 4))
    np.testing.assert_allclose(info["critic/return_mean"], 0.75, rtol=1e-6)
    _, info = step(batch=batch_of([(row, 0.75, 1.0, yes)] * 4))
    after = 0.75 + CONFIG.value_scale * float(tables()[1]["table"][3])  # of the state after the last action, shifted
    np.testing.assert_allclose(info["critic/return_mean"], 0.75 + after, rtol=1e-5)


def test_the_critic_warms_up_alone_and_counts_are_real_optimizer_steps():
    config = dataclasses.replace(SHUFFLED, critic_epochs=3, critic_warmup_steps=2, warmup_steps=4)
    state = fresh(config)
    for i in range(3):
        before = np.asarray(state.critic["table"])
        state, _ = update_for(config)(state, batch_of())
        moved = np.abs(np.asarray(state.actor["table"] - tables()[0]["table"])).max()
        assert (moved > 0) == (i >= 2) and np.abs(np.asarray(state.critic["table"]) - before).max() > 0
    assert update_for(config)._cache_size() == 1
    actor_steps, critic_steps = config.optimizer_steps(3)
    assert (actor_steps, critic_steps) == (4, 18)
    for opt, steps in ((state.actor_opt, actor_steps), (state.critic_opt, critic_steps)):
        assert {int(x) for x in jax.tree.leaves(opt) if x.shape == ()} == {steps}


def test_the_rate_warms_up_over_optimizer_steps():
    optimizer = make_optimizer(0.1, dataclasses.replace(CONFIG, warmup_steps=4, adam_eps=1e-8))
    opt, rates = optimizer.init(jnp.zeros(1)), []
    for _ in range(6):  # a constant gradient: Adam's step is the rate itself
        updates, opt = optimizer.update(jnp.ones(1), opt, jnp.zeros(1))
        rates.append(-float(updates[0]))
    np.testing.assert_allclose(rates, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-4)


def test_same_seed_same_numbers_and_the_key_moves():
    config = SHUFFLED
    a, _ = step(config)
    b, _ = step(config)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert (np.asarray(a.key) != np.asarray(fresh(config).key)).any()
    other, _ = update_for(config)(fresh(config, seed=1), batch_of())
    assert np.abs(np.asarray(other.actor["table"] - a.actor["table"])).max() > 0  # other minibatches


def test_donation_leaves_the_caller_s_params_alone():
    actor, critic = tables()
    state = init(jax.random.key(0), actor, critic, CONFIG)
    new, _ = update_for()(state, batch_of())
    assert state.actor["table"].is_deleted()
    assert np.isfinite(actor["table"]).all() and np.isfinite(critic["table"]).all()
    update_for()(new, batch_of())
    assert update_for()._cache_size() == 1


@pytest.mark.slow
def test_without_jit():
    want, _ = step()
    with jax.disable_jit():
        got, _ = make_update(POLICY, CRITIC, CONFIG)(fresh(), batch_of())  # type: ignore[arg-type]
    assert_same(got, want)


def test_a_critic_learns_rewards_from_minus_ten_to_one_in_ten_steps():
    config = dataclasses.replace(
        CONFIG, critic_lr=0.05, critic_epochs=2, minibatches=4, micro_rows=8, adam_eps=1e-8, actor_lr=0.0
    )
    rng = np.random.default_rng(0)
    state = fresh(config)
    for _ in range(10):
        contexts = rng.integers(1, 5, 32)
        rows = [([(0, no), (int(c), no), (5, yes)], (-10.0, -9.5, 0.9, 1.0)[c - 1], 1.0) for c in contexts]
        state, info = update_for(config)(state, batch_of(rows))
    assert info["critic/explained_variance"] > 0.95


def test_a_contextual_bandit_is_learned():
    config = dataclasses.replace(
        CONFIG, actor_lr=0.1, critic_lr=0.05, minibatches=2, micro_rows=16, temperature=1.0, adam_eps=1e-8
    )
    rng = np.random.default_rng(0)
    state = fresh(config)
    for _ in range(40):
        table = np.asarray(state.actor["table"], np.float64)
        contexts = rng.integers(1, 4, 32)
        actions = [int(rng.choice(V, p=np.exp(log_softmax(table[c])))) for c in contexts]
        rows = [
            ([(0, no), (int(c), no), (a, yes)], 0.75 if a == c + 3 else -10.0, 1.0)
            for c, a in zip(contexts, actions, strict=True)
        ]
        state, _ = update_for(config)(state, make_rows(rows, T, table))
    probs = np.exp(log_softmax(np.asarray(state.actor["table"])))
    assert min(probs[c, c + 3] for c in (1, 2, 3)) > 0.9


@pytest.mark.parametrize(
    "field, value",
    [
        ("epochs", 0), ("minibatches", 1.5), ("micro_rows", -1), ("warmup_steps", -1), ("actor_lr", float("nan")),
        ("clip", -0.1), ("temperature", 0.0), ("grad_clip", 0.0), ("value_clip", 0.0), ("value_scale", 0.0),
        ("gamma", 1.1), ("lam", -0.1), ("duration", "lineal"), ("duration_cap", 0.5), ("duration_floor_s", 0.0),
        ("behaviour_cap", 0.0), ("clip_high", -1.0), ("lengths", (5, 3)), ("lengths", [3, 5]), ("adam_b2", 1.0),
        ("rate_percentile", 101.0), ("entropy", float("inf")), ("kl", -0.1),
    ],
)  # fmt: skip
def test_a_bad_number_is_named(field, value):
    with pytest.raises(ValueError, match=rf"ppo\.{field}="):
        dataclasses.replace(CONFIG, **{field: value})


@pytest.mark.parametrize(
    "minibatches, micro_rows, devices, message",
    [(3, 1, 1, "32 rows.*minibatches=3"), (4, 3, 1, "8 rows.*micro_rows=3"), (4, 4, 8, "micro_rows=4.*fsdp=8")],
)
def test_rows_that_do_not_divide_are_named(minibatches, micro_rows, devices, message):
    config = dataclasses.replace(CONFIG, minibatches=minibatches, micro_rows=micro_rows)
    with pytest.raises(ValueError, match=message):
        config.check_rows(32, devices)


@pytest.mark.slow
def test_sharded_over_eight_devices_it_is_the_same_step_and_compiles_once():
    qwen = Qwen2Config(vocab_size=16, width=16, ffw=32, layers=2, heads=4, kv_heads=2, head_dim=8)
    policy, critic = Model(qwen), Model(qwen, "value")
    actor_params, critic_params = policy.init(jax.random.key(1)), critic.init(jax.random.key(2))
    config = dataclasses.replace(CONFIG, minibatches=2, micro_rows=4)
    batch = batch_of((*ROWS, *ROWS))

    def run(mesh):
        state = init(jax.random.key(0), actor_params, critic_params, config, mesh)
        shardings = None if mesh is None else state_shardings(mesh, state)
        update = make_update(policy, critic, config, shardings)
        for _ in range(3):
            state, _ = update(state, batch)
        assert update._cache_size() == 1
        return state

    want = run(None)
    mesh = make_mesh(fsdp=4, tp=2)
    with jax.set_mesh(mesh):
        got = run(mesh)
    for leaf, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(state_shardings(mesh, got)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    q = got.actor["layers"]["attn"]["q"]
    moments = [x for x in jax.tree.leaves(got.actor_opt) if x.shape == q.shape]
    assert len(moments) == 2 and all(x.sharding.is_equivalent_to(q.sharding, x.ndim) for x in moments)
    assert q.addressable_shards[0].data.size * 8 == q.size
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got.actor, want.actor)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got.critic, want.critic)
