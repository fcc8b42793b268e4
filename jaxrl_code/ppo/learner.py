"""PPO as one frozen state and one pure, donated step: state, info = update(state, batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jaxrl_code.models.logprob import action_logp_and_entropy
from jaxrl_code.models.qwen2 import Model
from jaxrl_code.ppo import losses
from jaxrl_code.ppo.advantages import gae, masked_mean, whiten
from jaxrl_code.ppo.config import PPOConfig
from jaxrl_code.ppo.duration import RateState, duration_aware
from jaxrl_code.ppo.minibatch import Info, Rows, fit, map_rows
from jaxrl_code.sharding import replicated, shardings_for
from jaxrl_code.types import Batch, Params

Update = Callable[..., tuple["LearnerState", Info]]


@struct.dataclass
class LearnerState:
    """All that training changes. `key` is raw key data, which every checkpoint format can hold."""

    actor: Params
    critic: Params
    actor_opt: optax.OptState
    critic_opt: optax.OptState
    step: jax.Array  # int32, RL steps done
    key: jax.Array  # uint32 [2]
    rates: RateState
    value_shift: jax.Array  # what the critic's zero means: the mean return of the first batch
    value_known: jax.Array  # bool, whether that batch has been seen


def make_optimizer(lr: float, config: PPOConfig) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; the warm-up counts the optimizer steps that are really taken."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        return lr * jnp.minimum((jnp.asarray(count) + 1) / max(config.warmup_steps, 1), 1.0)

    adam = optax.adamw(schedule, config.adam_b1, config.adam_b2, config.adam_eps, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), adam)


def init(key: jax.Array, actor: Params, critic: Params, config: PPOConfig, mesh: Mesh | None = None) -> LearnerState:
    """The state before the first step, laid out over `mesh`. It owns its arrays: the step may donate them."""

    def make(key: jax.Array, actor: Params, critic: Params) -> LearnerState:
        # jit hands an untouched input back as its output, and the first update would delete the caller's array.
        actor, critic, key = jax.tree.map(jnp.copy, (actor, critic, key))
        return LearnerState(
            actor=actor,
            critic=critic,
            actor_opt=make_optimizer(config.actor_lr, config).init(actor),
            critic_opt=make_optimizer(config.critic_lr, config).init(critic),
            step=jnp.zeros((), jnp.int32),
            key=key,
            rates=RateState.init(config.rate_window),
            value_shift=jnp.zeros((), jnp.float32),
            value_known=jnp.zeros((), bool),
        )

    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    shardings = None if mesh is None else state_shardings(mesh, jax.eval_shape(make, key, actor, critic))
    return jax.jit(make, out_shardings=shardings)(key, actor, critic)


def state_shardings(mesh: Mesh, state: LearnerState) -> LearnerState:
    """Where each array of a state (or of its ShapeDtypeStructs) lies: the rest of it is as small as a scalar."""
    small = jax.tree.map(lambda _: replicated(mesh), state)
    names = ("actor", "critic", "actor_opt", "critic_opt")
    return small.replace(**{name: shardings_for(mesh, getattr(state, name)) for name in names})


def policy_forward(model: Model, params: Params, rows: Rows, temperature: float) -> tuple[jax.Array, jax.Array]:
    """(logp_BT, entropy_BT) of the sampled tokens at the sampling temperature, token-aligned, 0 off actions."""
    hidden_BTD, _ = model.trunk(params, rows["tokens_BT"], rows["valid_BT"])
    return action_logp_and_entropy(model, params, hidden_BTD, rows["tokens_BT"], rows["action_BT"], temperature)


def value_forward(model: Model, params: Params, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """(value_BT, last_value_B) in units of value_scale: of the state before each token, and after the last one."""
    after_BT = model.apply(params, rows["tokens_BT"], rows["valid_BT"])
    last_B = jnp.maximum(rows["valid_BT"].sum(axis=1) - 1, 0)  # rows are right-padded
    last_value_B = jnp.take_along_axis(after_BT, last_B[:, None], axis=1)[:, 0]
    return jnp.pad(after_BT[:, :-1], ((0, 0), (1, 0))), last_value_B


def make_update(model: Model, critic_model: Model, config: PPOConfig, state_shardings: Any = None) -> Update:
    """update(state, batch, ref_logp_BT=None) -> (state, info), jitted, the old state donated.

    `state_shardings` is a LearnerState of NamedShardings (None: one device): the state leaves a step laid out as it
    came, or step two would compile again. `ref_logp_BT` (`make_logp` over the reference) is needed where kl > 0.
    """
    actor_optimizer = make_optimizer(config.actor_lr, config)
    critic_optimizer = make_optimizer(config.critic_lr, config)

    def actor_loss(params: Params, rows: Rows, count: jax.Array) -> tuple[jax.Array, Info]:
        mask = rows["action_BT"]
        logp_BT, entropy_BT = policy_forward(model, params, rows, config.temperature)
        loss, info = losses.policy_loss(
            logp_BT, rows["prox_logp_BT"], rows["adv_BT"], mask, count, *config.clip_range, rows.get("weight_BT")
        )
        entropy, entropy_info = losses.entropy_loss(entropy_BT, mask, count)
        loss, info = loss + config.entropy * entropy, info | entropy_info
        if "ref_logp_BT" in rows:
            kl, kl_info = losses.kl_loss(logp_BT, rows["ref_logp_BT"], mask, count)
            loss, info = loss + config.kl * kl, info | kl_info
        return loss, info

    def critic_loss(params: Params, rows: Rows, count: jax.Array) -> tuple[jax.Array, Info]:
        value_BT, _ = value_forward(critic_model, params, rows)
        return losses.value_loss(
            value_BT, rows["old_value_BT"], rows["ret_BT"], rows["action_BT"], count, config.value_clip
        )

    def update(state: LearnerState, batch: Batch, ref_logp_BT: jax.Array | None = None) -> tuple[LearnerState, Info]:
        config.check_rows(batch.tokens_BT.shape[0])
        if config.kl > 0 and ref_logp_BT is None:
            raise ValueError(f"ppo.kl={config.kl} needs the log-probs of a reference policy: pass ref_logp_BT")
        key, actor_key, critic_key = jax.random.split(jax.random.wrap_key_data(state.key), 3)
        mask_BT = batch.action_BT
        rows: Rows = {"tokens_BT": batch.tokens_BT, "valid_BT": batch.valid_BT, "action_BT": mask_BT}

        def before(micro: Rows) -> dict[str, jax.Array]:
            logp_BT, _ = policy_forward(model, state.actor, micro, config.temperature)
            value_BT, last_value_B = value_forward(critic_model, state.critic, micro)
            return {"logp_BT": logp_BT, "value_BT": value_BT, "last_value_B": last_value_B}

        old = map_rows(before, rows, config)

        reward_BT, weight_BT, rates, info = duration_aware(
            config.duration,
            *(batch.reward_BT, batch.duration_BT, batch.turn_end_BT, mask_BT, state.rates),
            *(config.duration_floor_s, config.duration_cap, config.rate_percentile),
        )
        acted_B = mask_BT.any(axis=1)
        first_shift = masked_mean(reward_BT.sum(axis=1), acted_B)
        shift = jnp.where(state.value_known, state.value_shift, first_shift)
        value_BT = shift + config.value_scale * old["value_BT"]
        last_value_B = shift + config.value_scale * old["last_value_B"]
        adv_BT, ret_BT = gae(reward_BT, value_BT, last_value_B, mask_BT, batch.truncated_B, config.gamma, config.lam)
        used_BT = (whiten(adv_BT, mask_BT) if config.whiten else adv_BT) * weight_BT

        actor_rows = rows | {"prox_logp_BT": old["logp_BT"], "adv_BT": used_BT}
        if config.behaviour_cap is not None:
            weight = losses.behaviour_weight(old["logp_BT"], batch.old_logp_BT, mask_BT, config.behaviour_cap)
            actor_rows["weight_BT"] = weight
            info["actor/behaviour_weight_mean"] = masked_mean(weight, mask_BT)
        if ref_logp_BT is not None:
            actor_rows["ref_logp_BT"] = ref_logp_BT
        critic_rows = rows | {"old_value_BT": old["value_BT"], "ret_BT": (ret_BT - shift) / config.value_scale}

        def learn() -> tuple[Params, optax.OptState, Info]:
            return fit(
                actor_loss, actor_optimizer, config.epochs, config, state.actor, state.actor_opt, actor_rows, actor_key
            )

        def wait() -> tuple[Params, optax.OptState, Info]:
            _, _, zeros = jax.eval_shape(learn)
            return state.actor, state.actor_opt, {k: jnp.zeros(s.shape, s.dtype) for k, s in zeros.items()}

        if config.critic_warmup_steps:
            actor, actor_opt, actor_info = jax.lax.cond(state.step >= config.critic_warmup_steps, learn, wait)
        else:
            actor, actor_opt, actor_info = learn()
        critic, critic_opt, critic_info = fit(
            *(critic_loss, critic_optimizer, config.critic_epochs, config),
            *(state.critic, state.critic_opt, critic_rows, critic_key),
        )

        error_BT = ret_BT - masked_mean(ret_BT, mask_BT)
        spread = masked_mean(error_BT**2, mask_BT)
        unexplained = masked_mean((ret_BT - value_BT) ** 2, mask_BT)
        info |= {k if "/" in k else f"actor/{k}": v for k, v in actor_info.items()}
        info |= {k if "/" in k else f"critic/{k}": v for k, v in critic_info.items()}
        info |= losses.mismatch(old["logp_BT"], batch.old_logp_BT, mask_BT)
        info |= {
            "actor/adv_abs_mean": masked_mean(jnp.abs(used_BT), mask_BT),
            "actor/adv_std": jnp.sqrt(masked_mean((adv_BT - masked_mean(adv_BT, mask_BT)) ** 2, mask_BT)),
            "critic/value_mean": masked_mean(value_BT, mask_BT),
            "critic/return_mean": masked_mean(ret_BT, mask_BT),
            # 1: the critic foretold the returns; 0: no better than their mean. Equal returns leave nothing to explain.
            "critic/explained_variance": jnp.where(spread > 1e-6, 1.0 - unexplained / jnp.maximum(spread, 1e-6), 0.0),
        }
        new = LearnerState(
            actor=actor,
            critic=critic,
            actor_opt=actor_opt,
            critic_opt=critic_opt,
            step=state.step + 1,
            key=jax.random.key_data(key),
            rates=rates,
            value_shift=shift,
            value_known=state.value_known | acted_B.any(),
        )
        return new, info

    return jax.jit(update, donate_argnums=0, out_shardings=(state_shardings, None))


def make_logp(model: Model, config: PPOConfig) -> Callable[[Params, Batch], jax.Array]:
    """logp(params, batch) -> logp_BT: the reference policy's log-probs, from params kept outside the donated state."""

    def logp(params: Params, batch: Batch) -> jax.Array:
        rows: Rows = {"tokens_BT": batch.tokens_BT, "valid_BT": batch.valid_BT, "action_BT": batch.action_BT}
        forward = lambda micro: {"logp_BT": policy_forward(model, params, micro, config.temperature)[0]}  # noqa: E731
        return map_rows(forward, rows, config)["logp_BT"]

    return jax.jit(logp)
