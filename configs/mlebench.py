"""PPO on MLE-bench-form competitions; the policy writes whole ML programs.

    python launch/train.py --config=configs/mlebench.py           # the paper's: Qwen2.5-3B-Instruct, 8 accelerators
    python launch/train.py --config=configs/mlebench.py:local     # the whole loop on a laptop, in minutes
    python launch/train.py --config=configs/mlebench.py:0.5b --config.ppo.clip=0.1 --workdir=runs/mine

"The paper" is arXiv 2509.01684. Presets: '' (the paper), local, 0.5b, 1.5b, 3b, 7b. Tuples, not lists; '' means unset.
"""

from typing import Any

from ml_collections import ConfigDict

PRESETS = ("", "local", "0.5b", "1.5b", "3b", "7b")


def get_config(preset: str = "") -> ConfigDict:
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r} in configs/mlebench.py; choose from {', '.join(filter(None, PRESETS))}")
    c: Any = ConfigDict()
    c.seed = 0
    c.steps = 100  # RL steps; the paper took 35 to 100

    c.model = ConfigDict()
    c.model.path = "Qwen/Qwen2.5-3B-Instruct"  # a Hugging Face folder, or a hub id that is in the local hub cache
    c.model.dtype = "bfloat16"  # compute; norms, softmax and logits are float32 always
    c.model.param_dtype = "float32"  # master weights: Adam's small steps vanish in bfloat16
    c.model.remat = "full"  # recompute a layer in the backward pass: memory before speed

    c.mesh = ConfigDict()  # devices in all = fsdp * tp
    c.mesh.fsdp = 8  # shards parameters, optimizer and batch
    c.mesh.tp = 1  # shards heads and feed-forward; only worth it when fsdp alone does not fit

    c.data = ConfigDict()
    c.data.root = ""  # competitions in MLE-bench's form; '' is the user's cache dir + mle-bench/data
    c.data.tasks = ()  # ids; () is every competition under the root

    c.rollout = ConfigDict()
    c.rollout.batch = 128  # programs a step (the paper)
    c.rollout.prompt_tokens = 1024  # (the paper)
    c.rollout.response_tokens = 1024  # (the paper)
    c.rollout.temperature = 0.7  # (the paper); the learner's log-probs are taken at the same temperature
    c.rollout.top_p = 1.0  # must stay 1 in training, or the log-probs belong to another distribution
    c.rollout.top_k = 0  # 0 is off; likewise
    c.rollout.improve_share = 0.5  # of the prompts show an earlier solution and ask to revise it (the paper)
    c.rollout.output_chars = 2000  # of terminal output in such a prompt, half of it head, half tail
    c.rollout.infra_abort_share = 0.5  # stop the run when more of a step than this is lost to faults of ours

    c.buffer = ConfigDict()  # of earlier solutions
    c.buffer.capacity = 64  # a task
    c.buffer.evict = "oldest"  # or 'worst'
    c.buffer.choice = "reward"  # parents drawn by reward, or 'uniform'
    c.buffer.failed_share = 0.2  # of the choices may be a failed program: revising those helped a 3B model little

    c.sampler = ConfigDict()
    c.sampler.kind = "local"  # the JAX engine in this process
    c.sampler.slots = 64  # sequences decoded together
    c.sampler.prompt_buckets = (256, 512, 1024)  # a prompt is padded to the smallest that holds it
    c.sampler.decode_chunk = 16  # tokens between two looks at who has finished

    c.sandbox = ConfigDict()
    c.sandbox.kind = "auto"  # 'docker' | 'local' (bubblewrap and cgroups) | 'auto' (local as far as this machine lets)
    c.sandbox.running = 0  # programs at once; 0 is one a core
    c.sandbox.wall_s = 600.0  # (RPG: 600 to 1200 s, 16 GB, 1 core)
    c.sandbox.memory_mb = 16384
    c.sandbox.cpus = 1.0
    c.sandbox.scratch_mb = 2048
    c.sandbox.processes = 256
    c.sandbox.grade_s = 60.0  # for grading one submission

    c.reward = ConfigDict()
    c.reward.invalid = -10.0  # no valid submission; must dwarf any score (the paper)
    c.reward.milestone = 0.1  # each verified milestone of a program without a valid submission (the paper)

    c.ppo = ConfigDict()
    c.ppo.actor_lr = 1e-5  # (the paper)
    c.ppo.critic_lr = 1e-5  # (the paper)
    c.ppo.warmup_steps = 0  # optimizer steps
    c.ppo.critic_warmup_steps = 0  # RL steps in which only the critic learns
    c.ppo.critic_epochs = 1  # regression bears more passes than the policy does
    c.ppo.epochs = 1  # passes over a batch: the paper's "100" is its number of RL steps
    c.ppo.minibatches = 1
    c.ppo.micro_rows = 8  # sequences a forward pass; smaller is less memory
    c.ppo.clip = 0.2  # (the paper)
    c.ppo.value_clip = float("inf")  # off: it limits how fast the critic may follow, and here it must follow fast
    c.ppo.value_scale = 5.0  # the critic predicts (return - first batch's mean) / this: -10 to 1 becomes two units
    c.ppo.entropy = 0.001  # (the paper)
    c.ppo.kl = 0.0  # weight of KL to the initial policy; RPG: 0.001. 0 keeps no reference
    c.ppo.gamma = 1.0  # a program is one action: no reason to discount its tokens (RPG)
    c.ppo.lam = 1.0  # (RPG)
    c.ppo.grad_clip = 1.0  # (the paper)
    c.ppo.duration = "none"  # right for a synchronous batch; 'linear' | 'inverse_log' | 'reward_rate' (ppo/duration.py)
    c.ppo.duration_cap = 10.0  # a duration counts at most this many times the batch's mean
    c.ppo.buckets = (2048,)  # a batch is padded to the smallest that holds its longest sequence; each compiles once
    c.ppo.lengths = (512, 1024)  # micro-batches of shorter sequences are cut to these

    c.eval = ConfigDict()  # before the first step and after the last
    c.eval.programs = 128
    c.eval.seed = 10_000  # sampling seeds that training never uses; the same before and after
    c.eval.table_png = True

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 1  # steps
    c.checkpoint.keep = 2

    c.log = ConfigDict()
    c.log.programs = 4  # a step, as text in TensorBoard

    if preset in ("0.5b", "1.5b", "3b", "7b"):
        c.model.path = f"Qwen/Qwen2.5-{preset.upper()}-Instruct"
        # Policy and critic take 16 bytes a parameter each, Adam included: 0.5B fits one accelerator, 7B eight of 80 GB.
        c.mesh.fsdp = {"0.5b": 1, "1.5b": 2, "3b": 8, "7b": 8}[preset]
        c.ppo.actor_lr = 1e-6 if preset == "7b" else 1e-5  # (RPG's actor, for the largest)

    if preset == "local":
        c.steps = 14
        c.model.path = "assets/qwen2-tiny-mle"
        c.model.dtype = "float32"  # CPUs here have no fast bfloat16
        c.model.remat = "none"  # the whole step fits many times over
        c.mesh.fsdp = 1
        c.data.root = "data/mlebench"
        c.rollout.batch = 32
        c.rollout.prompt_tokens = 640  # revisions take up to 600 of this policy's tokens, fresh prompts about 200
        c.rollout.response_tokens = 256
        c.rollout.temperature = 1.0
        c.rollout.output_chars = 400
        c.sampler.slots = 32
        c.sampler.prompt_buckets = (256, 640)
        c.sandbox.wall_s = 20.0
        c.sandbox.memory_mb = 1024
        c.sandbox.scratch_mb = 64
        c.ppo.actor_lr = 2e-4  # a model a thousand times smaller takes, and needs, larger steps
        c.ppo.critic_lr = 2e-4  # at 5e-4 it explained less than the mean of the returns
        c.ppo.critic_warmup_steps = 1
        c.ppo.epochs = 2
        c.ppo.minibatches = 4
        c.ppo.micro_rows = 2  # half the CPU seconds of 8: a long row lengthens fewer others
        c.ppo.critic_epochs = 2
        c.ppo.buckets = (896,)
        c.ppo.lengths = (400, 640)  # fresh attempts, most revisions; each length is ten seconds of compiling
    return c
