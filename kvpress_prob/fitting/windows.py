"""Texts as windows of equally many tokens, and what is known of a window before anything has run."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvpress_prob.fitting.texts import default_texts


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
    ValueError
        If the numbers allow no two windows, or the texts have none.
    """
    wanted = tokens // window
    if window < 2 or wanted < 2:
        raise ValueError(f"tokens must be at least two windows of {window} >= 2 tokens, got {tokens}")
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
