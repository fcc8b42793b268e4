"""The numbers of PPO as a frozen, checked dataclass: hashable, so that one config is one compiled step."""

from __future__ import annotations

import dataclasses

from jaxrl_code.ppo.duration import MODES

INF = float("inf")


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Coefficients may be 0.0 and mean it; what can be switched off is inf (a limit) or None, never 0."""

    actor_lr: float
    critic_lr: float
    temperature: float  # of the sampler: the log-probs, ratios and entropy belong to it; never applied to the critic
    epochs: int = 1
    critic_epochs: int = 1  # regression bears more passes over a batch than the policy does
    minibatches: int = 1  # optimizer steps an epoch
    micro_rows: int = 8  # sequences a forward and backward pass; memory, not mathematics
    # Micro-batches are cut to the shortest of these lengths that holds them (rows are sorted by length first, which
    # changes no gradient). Each one is compiled, once; () always pays for the whole T.
    lengths: tuple[int, ...] = ()

    warmup_steps: int = 0  # optimizer steps, of each optimizer, in which its rate rises linearly
    critic_warmup_steps: int = 0  # RL steps in which only the critic learns
    grad_clip: float = 1.0  # of the global norm; inf: off
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.0

    clip: float = 0.2
    clip_high: float | None = None  # None: as `clip`
    entropy: float = 0.0
    kl: float = 0.0
    behaviour_cap: float | None = None  # of the importance weight trainer / sampler; None: no correction
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True

    # The critic predicts (return - shift) / value_scale, with the mean return of the first batch as the shift. So it
    # starts at a useful baseline, and a jump from -10 to 1 is two units for weights that begin at zero, not eleven.
    value_scale: float = 5.0
    value_clip: float = INF  # in units of value_scale; inf: off

    duration: str = "none"
    duration_floor_s: float = 0.1
    duration_cap: float = INF  # times the batch's mean
    rate_window: int = 32  # batches that the price of a second remembers (mode 'reward_rate')
    rate_percentile: float = 95.0

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise ValueError(f"ppo.{name}={getattr(self, name)!r} must be {what}")

        for name in ("epochs", "critic_epochs", "minibatches", "micro_rows", "rate_window"):
            need(isinstance(getattr(self, name), int) and getattr(self, name) > 0, name, "an integer above 0")
        for name in ("warmup_steps", "critic_warmup_steps"):
            need(isinstance(getattr(self, name), int) and getattr(self, name) >= 0, name, "an integer, 0 or more")
        for name in ("actor_lr", "critic_lr", "clip", "entropy", "kl", "weight_decay"):
            need(0 <= getattr(self, name) < INF, name, "a finite number, 0 or more")
        need(self.clip_high is None or 0 <= self.clip_high < INF, "clip_high", "None or a finite number, 0 or more")
        need(self.behaviour_cap is None or self.behaviour_cap > 0, "behaviour_cap", "None (off) or above 0")
        for name in ("temperature", "value_scale", "adam_eps"):
            need(0 < getattr(self, name) < INF, name, "a finite number above 0")
        need(self.grad_clip > 0, "grad_clip", "above 0; inf switches it off")
        need(self.value_clip > 0, "value_clip", "above 0, or the critic never moves; inf switches it off")
        for name in ("gamma", "lam"):
            need(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        for name in ("adam_b1", "adam_b2"):
            need(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")
        need(self.duration in MODES, "duration", f"one of {MODES}")
        need(0 < self.duration_floor_s < INF, "duration_floor_s", "above 0 seconds: a weight divides by it")
        need(self.duration_cap >= 1, "duration_cap", "at least 1 (times the mean); inf switches it off")
        need(0 <= self.rate_percentile <= 100, "rate_percentile", "between 0 and 100")
        need(isinstance(self.lengths, tuple) and all(n > 0 for n in self.lengths), "lengths", "a tuple of lengths")
        need(list(self.lengths) == sorted(set(self.lengths)), "lengths", "in increasing order")

    def check_rows(self, rows: int, data_devices: int = 1) -> None:
        """ValueError unless a batch of `rows` divides into minibatches, micro-batches and devices."""
        if rows % self.minibatches:
            raise ValueError(f"a batch of {rows} rows does not divide by ppo.minibatches={self.minibatches}")
        if (rows // self.minibatches) % self.micro_rows:
            raise ValueError(
                f"a minibatch of {rows // self.minibatches} rows does not divide by ppo.micro_rows={self.micro_rows}"
            )
        if self.micro_rows % data_devices:
            raise ValueError(f"ppo.micro_rows={self.micro_rows} does not divide by mesh.fsdp={data_devices}")

    def optimizer_steps(self, rl_steps: int) -> tuple[int, int]:
        """Real optimizer steps of (actor, critic) in `rl_steps`: what `warmup_steps` counts, warm-up included."""
        acting = max(rl_steps - self.critic_warmup_steps, 0)
        return acting * self.epochs * self.minibatches, rl_steps * self.critic_epochs * self.minibatches

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip, self.clip if self.clip_high is None else self.clip_high
