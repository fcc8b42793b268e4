"""The PPO numbers again, slowly: loops over explicit lists of actions, one line per equation."""

from __future__ import annotations

import numpy as np


def gae(reward_BT, value_BT, last_value_B, action_BT, truncated_B, gamma, lam):
    adv_BT, ret_BT = np.zeros(reward_BT.shape), np.zeros(reward_BT.shape)
    for b in range(reward_BT.shape[0]):
        slots = [t for t in range(reward_BT.shape[1]) if action_BT[b, t]]
        next_value, next_adv = (float(last_value_B[b]) if truncated_B[b] else 0.0), 0.0
        for t in reversed(slots):
            delta = float(reward_BT[b, t]) + gamma * next_value - float(value_BT[b, t])
            next_adv = delta + gamma * lam * next_adv
            next_value = float(value_BT[b, t])
            adv_BT[b, t], ret_BT[b, t] = next_adv, next_adv + next_value
    return adv_BT, ret_BT


def duration_weights(mode, durations, floor_s, cap):
    """One weight an action, for a flat list of durations."""
    dt = [max(float(d), floor_s) for d in durations]
    limit = cap * sum(dt) / len(dt)
    dt = [min(d, limit) for d in dt]
    raw = {"none": [1.0] * len(dt), "linear": dt, "inverse_log": [1 / np.log(1 + d) for d in dt]}[mode]
    return np.array(raw) * len(raw) / sum(raw)


def policy_loss(logp, old_logp, adv, mask, clip_low, clip_high):
    total = 0.0
    for lp, old, a, m in zip(logp.flat, old_logp.flat, adv.flat, mask.flat, strict=True):
        if m:
            ratio = 1.0 if np.isnan(old) else float(np.exp(lp - old))
            total += min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
    return -total / mask.sum()


def value_loss(value, old_value, ret, mask, clip):
    total = 0.0
    for v, old, r, m in zip(value.flat, old_value.flat, ret.flat, mask.flat, strict=True):
        if m:
            held = old + min(max(v - old, -clip), clip)
            total += max((v - r) ** 2, (held - r) ** 2)
    return 0.5 * total / mask.sum()
