"""Chat as token ids: a conversation grows by appending ids, and what was sampled is never tokenised again.

The template is the tokenizer's own (Qwen's ChatML). A turn that the policy wrote ends in the <|im_end|> that it
sampled; `continue_ids` gives what follows it, the template's newline included, so that the ids built turn by turn are
those of the whole conversation rendered at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Message = Mapping[str, str]  # {'role': 'system' | 'user' | 'assistant', 'content': text}

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Qwen2.5's template without tools and without the default system prompt.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class _HasVocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


class Tokenizer:
    """A Hugging Face tokenizer with a ChatML template, seen as the few calls that rollouts need."""

    def __init__(self, hf: Any, extra_stop_ids: Iterable[int] = ()) -> None:
        self._hf = hf
        known = hf.get_vocab()
        missing = [token for token in (TURN_START, TURN_END) if token not in known]
        if missing:
            raise ValueError(f"tokenizer lacks {', '.join(missing)}: use the tokenizer of a Qwen2.5 chat model")
        if not hf.chat_template:
            raise ValueError("tokenizer has no chat template: use an instruct model's, or save a template with it")
        self.vocab_size: int = max(known.values()) + 1  # ids in use; a model's table may be larger (padding)
        self.turn_end_id: int = known[TURN_END]
        # Qwen's config.json and generation_config.json name different end tokens: either ends a turn.
        end_ids = [self.turn_end_id, known.get(END_OF_TEXT), hf.eos_token_id, *extra_stop_ids]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(int(i) for i in end_ids if i is not None))
        self.pad_id: int = next(int(i) for i in (hf.pad_token_id, hf.eos_token_id, self.turn_end_id) if i is not None)
        self._special = tuple(token.content for token in hf.added_tokens_decoder.values())
        self._probe = self._render([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], False)
        if TURN_END not in self._probe:
            raise ValueError(f"chat template does not end an assistant turn in {TURN_END}: use a ChatML template")

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of plain text; the spelling of a special token in it stays text."""
        return self._ids(text, split_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> np.ndarray:
        """Ids [n] of a whole conversation, followed by the assistant's header if asked for."""
        return self._ids(self._render([self._checked(m) for m in messages], add_generation_prompt))

    def continue_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids [n] that follow a sampled <|im_end|>: the template's newline, `messages`, the assistant's header."""
        conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        text = self._render(conversation + [self._checked(m) for m in messages], True)
        turn = self._probe[: self._probe.rindex(TURN_END) + len(TURN_END)]
        if not text.startswith(turn):
            raise ValueError("chat template rewrites earlier turns when a message is added: use one that only appends")
        return self._ids(text[len(turn) :])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids without special tokens."""
        return self._hf.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def check_fits(self, config: _HasVocabulary) -> None:
        """ValueError if the tokenizer can make ids that the model has no embedding for."""
        if self.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.vocab_size} tokens but the model's vocab_size is {config.vocab_size}: "
                "use the tokenizer that was saved with the model"
            )

    def _ids(self, text: str, **kwargs: Any) -> np.ndarray:
        return np.asarray(self._hf.encode(text, add_special_tokens=False, **kwargs), np.int32)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return self._hf.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _checked(self, message: Message) -> dict[str, str]:
        """The message with the special tokens in its content broken up: a program's output must not forge a turn."""
        unknown = set(message) ^ {"role", "content"}
        if unknown or message["role"] not in ("system", "user", "assistant") or not isinstance(message["content"], str):
            raise ValueError(
                f"message {dict(message)!r:.200} is not {{'role': 'system' | 'user' | 'assistant', 'content': text}}"
            )
        content = message["content"]
        for token in self._special:
            if token in content:
                content = content.replace(token, token[0] + " " + token[1:])
        return {"role": message["role"], "content": content}


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a Hugging Face folder (or hub id), with the stop ids of its generation_config.json."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing is as it should be
    from transformers import AutoTokenizer  # takes two seconds to import

    try:
        hf = AutoTokenizer.from_pretrained(os.fspath(path))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no tokenizer could be loaded from {os.fspath(path)!r} ({reason}): give a folder with tokenizer.json and "
            "tokenizer_config.json, or a hub id"
        ) from error
    generation = Path(path) / "generation_config.json"
    stop = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    return Tokenizer(hf, [] if stop is None else [stop] if isinstance(stop, int) else stop)


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | os.PathLike[str]) -> Tokenizer:
    """Train a byte-level BPE of Qwen2's form, save it to `out_dir` in Hugging Face format and return it loaded.

    `vocab_size` counts the 256 bytes and the three special tokens, whose ids come last; short texts may give fewer.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import Qwen2Tokenizer

    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small: a byte-level vocabulary needs at least {smallest}")
    rust: Any = RustTokenizer(models.BPE())
    empty: Any = Qwen2Tokenizer()._tokenizer  # for exactly its normaliser and pre-tokeniser
    rust.normalizer, rust.pre_tokenizer, rust.decoder = empty.normalizer, empty.pre_tokenizer, decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[reportCallIssue]
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(texts, trainer)
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    model = json.loads(rust.to_str())["model"]
    hf = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],  # type: ignore[reportArgumentType]
        unk_token=None,  # type: ignore[reportArgumentType]
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START],
    )
    hf.chat_template = CHAT_TEMPLATE
    hf.save_pretrained(os.fspath(out_dir))
    return load(out_dir)
