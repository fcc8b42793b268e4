"""Makes the small policy that ships with the repository: a tokenizer and a Qwen2, taught by demonstrations.

    python launch/sft.py --out=assets/qwen2-tiny-mle

Half an hour on two cores. The same seed on the same machine gives the same policy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxrl_code import chat, corpus, sft
from jaxrl_code.models import hf
from jaxrl_code.models.qwen2 import Model, Qwen2Config
from jaxrl_code.tasks.builtin import BUILTINS
from jaxrl_code.tasks.competition import load_all
from jaxrl_code.tasks.prepared import prepare
from jaxrl_code.tasks.prompts import PromptLimits
from jaxrl_code.types import Params

LIMITS = PromptLimits(output_head_chars=200, output_tail_chars=200)  # as the `local` preset shows them
PROMPT_LENGTHS, ANSWER_LENGTHS = (256, 640), (144, 192, 272)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes the small policy that ships with the repository.")
    parser.add_argument("--out", required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps")
    parser.add_argument("--variants", type=int, default=150, help="tasks with other names, beside the built-in ones")
    parser.add_argument("--vocab", type=int, default=1600)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=2, help="demonstrations run at once")
    args = parser.parse_args(argv)
    try:
        make(args)
    except (ValueError, OSError) as error:
        sys.exit(f"sft: {error}")


def make(args: argparse.Namespace) -> None:
    out, start = Path(args.out), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        groups = make_corpus(Path(scratch), args)
    texts = [text for group in groups for text in (*(m["content"] for m in group.messages), *group.answers)]
    tokenizer = chat.train_tokenizer(texts, args.vocab, out)
    examples = [encode(tokenizer, group) for group in groups]
    prompts = [len(example.prompt_ids) for example in examples]
    answers = [len(ids) for example in examples for ids in example.answers]
    print(f"{len(examples)} prompts, {len(answers)} answers made in {time.monotonic() - start:.0f} s; tokens a prompt: "
          f"median {np.median(prompts):.0f}, at most {max(prompts)}; an answer: median {np.median(answers):.0f}, "
          f"at most {max(answers)}")  # fmt: skip

    config = Qwen2Config(
        vocab_size=tokenizer.vocab_size, width=args.width, ffw=args.width * 3, layers=args.layers,
        heads=args.width // 32, kv_heads=max(1, args.width // 64), head_dim=32, rope_theta=1e4, max_len=2048,
    )  # fmt: skip
    model = Model(config)
    params = jax.jit(model.init)(jax.random.key(args.seed))
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6:.2f} M parameters")
    rng = np.random.default_rng(args.seed)
    passes = (sft.batches(examples, rng, PROMPT_LENGTHS, ANSWER_LENGTHS, tokens=4096) for _ in itertools.count())
    data = itertools.chain.from_iterable(passes)
    stop = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    (out / "generation_config.json").write_text(json.dumps(stop, indent=2) + "\n")

    def show(step: int, text: str, params: Params) -> None:
        print(text, flush=True)
        hf.save(out, config, params)

    sft.train(model, params, data, steps=args.steps, lr=args.lr, warmup=100, show=show, show_every=100)
    print(f"wrote {out} after {time.monotonic() - start:.0f} s")


def make_corpus(scratch: Path, args: argparse.Namespace) -> list[corpus.Group]:
    for task in BUILTINS:
        prepare(task, scratch / "builtin")
    real = list(load_all(scratch / "builtin"))
    renamed = corpus.variants(real, args.variants, scratch / "variants", args.seed)
    earlier = corpus.run_earlier(real, 60, args.seed, LIMITS, args.workers)
    earlier += corpus.run_earlier(renamed, 6, args.seed, LIMITS, args.workers)
    valid = sum(e.solution.valid for e in earlier) / len(earlier)
    print(f"{len(earlier)} demonstrations were run, {valid:.0%} valid")
    return [
        *corpus.fresh_groups(real, 100, 8, args.seed, LIMITS),
        *corpus.fresh_groups(renamed, 10, 8, args.seed, LIMITS),
        *corpus.improve_groups(earlier, 4, args.seed, LIMITS),
    ]


def encode(tokenizer: chat.Tokenizer, group: corpus.Group) -> sft.Example:
    answers = (np.append(tokenizer.encode(answer), tokenizer.turn_end_id).astype(np.int32) for answer in group.answers)
    return sft.Example(tokenizer.encode_chat(group.messages), tuple(answers))


if __name__ == "__main__":
    main()
