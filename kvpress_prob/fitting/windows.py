"""Texts as windows of equally many tokens, and what is known of a window before anything has run."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvpress_prob.fitting.texts import default_texts
from kvpress_prob.maths.arguments import check_integer, check_seed


@dataclass(frozen=True)
class Windows:
    """Windows to fit on.

    Attributes
    ----------
    ids : Int[Tensor, "windows n"]
    source : str
        Where the texts come from.
    """

    ids: Tensor
    source: str

    @property
    def digest(self) -> str:
        """Hexadecimal digest of all tokens."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def cut_windows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] | None, *, tokens: int, window: int, seed: int = 0
) -> Windows:
    """``tokens // window`` windows, or as many as the texts have; half of them begin as a chat does, if the tokenizer
    knows how.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    texts : sequence of str, optional
        Each is cut into windows, what is left at its end is dropped; windows are taken evenly from all. None takes
        ``default_texts``, one window of each.
    tokens, window : int
    seed : int
        Of the default texts.

    Raises
    ------
    TypeError
        For texts that are no texts.
    ValueError
        If the numbers allow no two windows, or the texts have none.
    """
    check_integer("window", window, 2)
    check_integer("tokens", tokens, 1)
    check_seed("seed", seed)
    wanted = tokens // window
    if wanted < 2:
        raise ValueError(f"tokens must be at least two windows of {window} tokens, got {tokens}")
    texts = None if texts is None else _all_texts(texts)
    prefix = _chat_prefix(tokenizer)
    if len(prefix) >= window // 2:
        prefix = []
    if texts is None:
        # Domains come in turn: whole rounds of them alternate with and without the prefix.
        cut = [_first(tokenizer, text, window, prefix if i // 4 % 2 == 0 else []) for i, (_, text) in
               enumerate(default_texts(wanted, seed))]  # fmt: skip
        source = f"default texts, seed {seed}"
    else:
        every = [window_ for text in texts for window_ in _pieces(tokenizer, text, window, prefix)]
        count = min(wanted, len(every))
        cut = [every[i * len(every) // count] for i in range(count)]
        source = f"{len(texts)} given texts"
    if len(cut) < 2:
        raise ValueError(f"texts must have at least two windows of {window} tokens, got {len(cut)}")
    return Windows(torch.tensor(cut), source)


def _all_texts(texts: Any) -> list[str]:
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"texts must be a sequence of texts, such as [text], got {type(texts).__name__}")
    every = list(texts)
    wrong = [type(text).__name__ for text in every if not isinstance(text, str)]
    if wrong:
        raise TypeError(f"texts must be a sequence of texts, got {wrong[0]} among them")
    return every


def _first(tokenizer: Any, text: str, window: int, prefix: list[int]) -> list[int]:
    ids = (prefix + tokenizer.encode(text, add_special_tokens=False))[:window]
    # A tokenizer with long tokens may need the text again.
    while len(ids) < window:
        ids = (ids + tokenizer.encode(text, add_special_tokens=False))[:window]
    return ids


def _pieces(tokenizer: Any, text: str, window: int, prefix: list[int]) -> Iterator[list[int]]:
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    begin, number = 0, 0
    while True:
        start = prefix if number % 2 == 0 else []
        piece = start + ids[begin : begin + window - len(start)]
        if len(piece) < window:
            return
        yield piece
        begin, number = begin + window - len(start), number + 1


def _chat_prefix(tokenizer: Any) -> list[int]:
    """What a chat template puts before a context; nothing without a template."""
    if tokenizer.chat_template is None:
        return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    message = [{"role": "user", "content": "context"}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    return tokenizer.encode(text.split("context")[0], add_special_tokens=False)
