"""Builds everything from a config, then trains in a loop that reads top to bottom."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_code import chat, display, evaluation, preflight
from jaxrl_code.checkpoint import Checkpoints
from jaxrl_code.compiles import CompileCounter
from jaxrl_code.metrics import Metrics, sample_markdown
from jaxrl_code.models import hf
from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.ppo import learner
from jaxrl_code.ppo.config import PPOConfig
from jaxrl_code.rewards import reward
from jaxrl_code.rollout.batching import make_batch
from jaxrl_code.rollout.episode import World, grade_spec
from jaxrl_code.rollout.pipeline import Pipeline
from jaxrl_code.rollout.stats import histograms, rollout_metrics
from jaxrl_code.sampling.base import SamplingParams
from jaxrl_code.sampling.local import LocalSampler
from jaxrl_code.sharding import batch_sharding, make_mesh, shardings_for
from jaxrl_code.tasks import competition
from jaxrl_code.tasks.prompts import PromptLimits
from jaxrl_code.tasks.solutions import SolutionBuffer
from jaxrl_code.types import Batch, Episode, Params
from sandbox.grader import Grader
from sandbox.manager import make_sandbox
from sandbox.protocol import Limits


class Stop(Exception):
    """The run ends here, for a reason that one line tells. The last checkpoint is good."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A config that was found good, and what was read to find that out. Nothing large is built yet."""

    config: Any
    weights: Path
    model: Qwen2Config
    ppo: PPOConfig
    tokenizer: chat.Tokenizer
    tasks: tuple[competition.Competition, ...]
    prompt_limits: PromptLimits


def plan(config: Any) -> Plan:
    """For a config that `preflight.check` let pass; raises ValueError for what only reading the files can tell."""
    c = config
    weights = preflight.weights_folder(c.model.path)
    assert weights is not None
    model = hf.read_config(weights, dtype=c.model.dtype, param_dtype=c.model.param_dtype, remat=c.model.remat)
    if model.max_len < c.rollout.prompt_tokens + c.rollout.response_tokens:
        raise ValueError(
            f"config.rollout: prompt_tokens = {c.rollout.prompt_tokens} and response_tokens = "
            f"{c.rollout.response_tokens} exceed the model's context of {model.max_len}; lower them"
        )
    tokenizer = chat.load(weights)
    tokenizer.check_fits(model)
    tasks = competition.load_all(preflight.data_root(c), c.data.tasks)
    competition.check_invalid_reward(tasks, c.reward.invalid)
    half = c.rollout.output_chars // 2
    limits = PromptLimits(output_head_chars=half, output_tail_chars=half)
    return Plan(c, weights, model, preflight.ppo_config(c), tokenizer, tasks, limits)


async def train(plan: Plan, workdir: Path) -> None:
    """Trains to config.steps from the newest checkpoint in `workdir`, or from the start. Raises Stop."""
    c = plan.config
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(c.to_json_best_effort(indent=1))
    mesh = make_mesh(c.mesh.fsdp, c.mesh.tp, jax.devices()[: c.mesh.fsdp * c.mesh.tp])
    with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        actor_model, critic_model = Model(plan.model), Model(plan.model, "value")
        _, params = hf.load(plan.weights, dtype=c.model.dtype, param_dtype=c.model.param_dtype, remat=c.model.remat)
        critic = hf.critic_from_policy(params)
        state = learner.init(jax.random.key(c.seed), params, critic, plan.ppo, mesh)
        update = learner.make_update(actor_model, critic_model, plan.ppo, learner.state_shardings(mesh, state))
        reference = None
        if plan.ppo.kl > 0:  # the policy as it was before the first step, also when this run resumes
            initial = jax.device_put(params, shardings_for(mesh, params))
            reference = functools.partial(learner.make_logp(actor_model, plan.ppo), initial)
        del params, critic

        checkpoints = Checkpoints(workdir, _identity(plan), c.checkpoint.keep)
        first, state, host = _restored(checkpoints, state)
        metrics = stack.enter_context(contextlib.closing(Metrics(workdir, resume_step=first - 1)))
        compiles = stack.enter_context(contextlib.closing(CompileCounter()))
        screen = stack.enter_context(display.Display(c.steps, first))
        async with _world(plan, actor_model, state.actor, first, metrics, screen) as world:
            pipeline = Pipeline(
                *(world, plan.tasks, SolutionBuffer(**c.buffer), plan.prompt_limits),
                *(c.rollout.prompt_tokens, c.rollout.improve_share, c.seed),
            )
            if host is not None:
                pipeline.load_state_dict(host["pipeline"])
                screen.note(f"going on from step {first} of {c.steps} ({workdir})")
            before = await _evaluation(plan, world, workdir, metrics, 0, first)

            for step in range(first, c.steps):
                episodes = await pipeline.collect(step, c.rollout.batch)
                _stop_if_lost(episodes, c.rollout.infra_abort_share)
                with metrics.phase("update"):
                    batch, sizes = make_batch(episodes, c.ppo.buckets, c.rollout.batch, plan.tokenizer.pad_id)
                    batch = jax.device_put(batch, batch_sharding(mesh))
                    # In a thread: the event loop's clock is the sandbox's, and must not stand still.
                    state, info = await asyncio.to_thread(_step, mesh, update, reference, state, batch)
                with metrics.phase("sync"):
                    await world.sampler.update_weights(state.actor, step + 1)
                _log_samples(metrics, step, episodes, c.log.programs)
                row = sizes | rollout_metrics(episodes) | info | metrics.times() | {"time/compiles": compiles.read()}
                metrics.log(step, row)
                screen.step(step, row)
                if (step + 1) % c.checkpoint.every == 0 or step + 1 == c.steps:
                    metrics.flush()  # a checkpoint never knows more than the metrics do
                    with metrics.phase("checkpoint"):
                        _save(checkpoints, step + 1, state, {"pipeline": pipeline.state_dict()})

            after = await _evaluation(plan, world, workdir, metrics, c.steps, first)
        hf.save(workdir / "policy", plan.model, jax.device_get(state.actor))
    display.finish(workdir, before, after)


@contextlib.asynccontextmanager
async def _world(
    plan: Plan, model: Model, params: Params, version: int, metrics: Metrics, screen: display.Display
) -> AsyncIterator[World]:
    """Starts sampler, sandbox and grader side by side, and leaves nothing of them behind."""
    c = plan.config
    sampler = LocalSampler(
        model,
        params,
        slots=c.sampler.slots,
        max_len=c.rollout.prompt_tokens + c.rollout.response_tokens,
        prompt_buckets=tuple(c.sampler.prompt_buckets),
        decode_chunk=c.sampler.decode_chunk,
        version=version,
    )
    sandbox = make_sandbox(c.sandbox.kind, max_running=c.sandbox.running)
    grader = Grader(timeout_s=c.sandbox.grade_s)
    limits = Limits(
        wall_s=c.sandbox.wall_s,
        memory_mb=c.sandbox.memory_mb,
        cpus=c.sandbox.cpus,
        processes=c.sandbox.processes,
        scratch_mb=c.sandbox.scratch_mb,
    )
    sampling = SamplingParams(c.rollout.response_tokens, plan.tokenizer.stop_ids, c.rollout.temperature)
    pay = functools.partial(reward, invalid=c.reward.invalid, milestone=c.reward.milestone)
    try:
        held, _, _ = await asyncio.gather(sandbox.start(), grader.start(), sampler.start())
        await sampler.warmup()  # a prompt length first seen late must not compile then
        screen.note(f"sandbox {held.backend}; not held back: {', '.join(held.not_held) or 'nothing'}")
        metrics.text(version, "env/sandbox", f"{held.backend}\n\nheld: {held.held}\n\nnot held: {held.not_held}")
        try:
            await asyncio.gather(*(grader.check(grade_spec(task)) for task in plan.tasks))
        except ValueError as error:
            raise Stop(str(error)) from error
        yield World(sampler, sandbox, grader, plan.tokenizer, sampling, limits, pay, metrics.phase)
    finally:
        await asyncio.gather(sampler.close(), sandbox.close(), grader.close())


async def _evaluation(
    plan: Plan, world: World, workdir: Path, metrics: Metrics, step: int, first: int
) -> list[dict[str, Any]]:
    """The evaluation of `step`: made once, then read back by a run that resumes."""
    c = plan.config
    path = workdir / f"eval_{step:05d}.json"
    made_with = {"model": _identity(plan), "tasks": [task.id for task in plan.tasks], **c.eval.to_dict()}
    records = evaluation.load(path, made_with)
    if records is None:
        records = await evaluation.evaluate(world, plan.tasks, c.eval.programs, c.eval.seed, plan.prompt_limits)
        evaluation.save(path, made_with, records)
    if step >= first:  # else its line stands already
        metrics.log(step, evaluation.metrics_of(records))
    return records


def _step(mesh: Mesh, update: learner.Update, reference: Any, state: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
    with jax.set_mesh(mesh):  # a thread has its own
        args = () if reference is None else (reference(batch),)
        return jax.block_until_ready(update(state, batch, *args))


def _restored(checkpoints: Checkpoints, state: learner.LearnerState) -> tuple[int, Any, dict[str, Any] | None]:
    try:
        found = checkpoints.restore(state)
    except ValueError as error:  # of another model
        raise Stop(str(error)) from error
    return (0, state, None) if found is None else found


def _save(checkpoints: Checkpoints, step: int, state: Any, host: dict[str, Any]) -> None:
    try:
        checkpoints.save(step, state, host)
    except OSError as error:
        raise Stop(error.strerror or str(error)) from error


def _stop_if_lost(episodes: list[Episode], limit: float) -> None:
    lost = [episode for episode in episodes if episode.masked]
    if len(lost) > limit * len(episodes):
        raise Stop(
            f"{len(lost)} of {len(episodes)} programs were lost to faults of the sandbox or the grader, more than "
            f"rollout.infra_abort_share = {limit}; the last one: {lost[-1].info['detail']}"
        )


def _log_samples(metrics: Metrics, step: int, episodes: list[Episode], count: int) -> None:
    for name, values in histograms(episodes).items():
        metrics.histogram(step, name, values)
    for i, episode in enumerate(episodes[:count]):
        facts = {"task": episode.task_id, "prompt": episode.kind, "reward": round(episode.reward, 4)}
        facts |= {name: episode.info[name] for name in ("outcome", "score", "wall_s", "milestones")}
        text = sample_markdown(facts, episode.info["answer"], episode.info["output"])
        metrics.text(step, f"rollout/program_{i}", text)


def _identity(plan: Plan) -> str:
    """Names what a checkpoint is of: where the weights came from, and their shape."""
    model = dataclasses.asdict(plan.model)
    return f"{plan.config.model.path} {json.dumps({k: v for k, v in model.items() if k not in ('dtype', 'remat')})}"
