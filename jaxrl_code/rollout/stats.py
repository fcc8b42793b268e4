"""A step's episodes as metrics. Failures count: no mean is over what went well alone unless it says so."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_code.types import Episode
from sandbox.markers import MILESTONES
from sandbox.protocol import Outcome


def rollout_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Flat metrics of a batch. Masked episodes (infra faults) show in env/infra_share and nowhere else."""
    kept = [episode for episode in episodes if not episode.masked]
    out = {"env/infra_share": 1 - len(kept) / len(episodes)}
    if not kept:
        return out
    info = [episode.info for episode in kept]
    valid = [i["score"] is not None for i in info]
    ran = [i for i in info if i["program"] is not None]
    out |= {
        "rollout/reward_mean": _mean(episode.reward for episode in kept),
        "rollout/reward_max": max(episode.reward for episode in kept),
        "rollout/valid_share": _mean(valid),
        "rollout/improve_share": _mean(episode.kind == "improve" for episode in kept),
        "rollout/truncated_share": _mean(episode.turns[-1].stop_reason == "length" for episode in kept),
        "rollout/program_share": len(ran) / len(kept),
        "rollout/distinct_programs_share": len({i["program"] for i in ran}) / max(len(ran), 1),
    }
    parts = collections.defaultdict(list)
    for episode in kept:
        for name, value in episode.turns[-1].reward_parts.items():
            parts[name].append(value)
    out |= {f"rollout/reward_{name}": sum(values) / len(kept) for name, values in parts.items()}
    if any(valid):
        out["rollout/valid_reward_mean"] = _mean(e.reward for e, ok in zip(kept, valid, strict=True) if ok)
    for kind in ("fresh", "improve"):
        ours = [ok for episode, ok in zip(kept, valid, strict=True) if episode.kind == kind]
        if ours:
            out[f"rollout/{kind}_valid_share"] = _mean(ours)
    better = [e.reward > e.info["parent_reward"] for e in kept if e.info["parent_reward"] is not None]
    if better:
        out["rollout/improved_share"] = _mean(better)
    if ran:
        wall = np.array([i["wall_s"] for i in ran])
        out |= {
            "env/duration_mean_s": float(wall.mean()),
            "env/duration_max_s": float(wall.max()),
            "env/cpu_mean_s": _mean(i["cpu_s"] for i in ran),
            "env/queue_mean_s": _mean(i["queue_s"] for i in ran),
        }
        for name in MILESTONES:
            out[f"env/milestone_{name}"] = _mean(name in i["milestones"] for i in ran)
    outcomes = collections.Counter(i["outcome"] for i in info)
    return out | {f"env/outcome_{outcome}": outcomes[outcome] / len(kept) for outcome in Outcome if outcome != "infra"}


def histograms(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    kept = [episode for episode in episodes if not episode.masked]
    return {
        "rollout/reward": np.array([episode.reward for episode in kept]),
        "rollout/response_tokens": np.array([len(turn.action_ids) for episode in kept for turn in episode.turns]),
        "env/duration_s": np.array([episode.info["wall_s"] for episode in kept]),
    }


def _mean(values: Any) -> float:
    return float(np.mean([float(value) for value in values]))
