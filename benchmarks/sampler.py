"""Tokens a second of the embedded sampler, all requests together against one after the other.

    python benchmarks/sampler.py [--slots 32] [--requests 32] [--prompt 250] [--tokens 200]

The model is random and of the size of the one that ships: width 192, 4 layers, 6 heads over 2 kv heads, 1536 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import jax
import numpy as np

from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.sampling.base import Request, SamplingParams
from jaxrl_code.sampling.local import LocalSampler

CONFIG = Qwen2Config(vocab_size=1536, width=192, ffw=512, layers=4, heads=6, kv_heads=2, head_dim=32, max_len=4096)


async def main(args: argparse.Namespace) -> None:
    model = Model(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, args.prompt).astype(np.int32) for _ in range(args.requests)]
    max_len = -(-(args.prompt + args.tokens) // 64) * 64
    bucket = -(-args.prompt // 64) * 64

    async def measure(slots: int, prompts: list[np.ndarray], tokens: int, together: bool) -> float:
        """The least seconds of three tries."""
        sampler = LocalSampler(model, params, slots=slots, max_len=max_len, prompt_buckets=(bucket,))
        await sampler.start()
        await sampler.warmup()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            calls = [sampler.sample(Request(p, SamplingParams(tokens, ()), i)) for i, p in enumerate(prompts)]
            if together:
                await asyncio.gather(*calls)
            else:
                for call in calls:
                    await call
            seconds.append(time.perf_counter() - start)
        await sampler.close()
        return min(seconds)

    prefill = await measure(args.slots, prompts, 1, True) / args.requests
    together = args.requests * args.tokens / await measure(args.slots, prompts, args.tokens, True)
    alone = args.tokens / await measure(8, prompts[:1], args.tokens, False)  # 8 is the least number of slots
    print(f"prefill     {prefill * 1e3:8.1f} ms a prompt of {args.prompt} tokens")
    print(f"together    {together:8.0f} tokens/s in {args.slots} slots")
    print(f"one by one  {alone:8.0f} tokens/s")
    print(f"ratio       {together / alone:8.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("slots", 32), ("requests", 32), ("prompt", 250), ("tokens", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asyncio.run(main(parser.parse_args()))
