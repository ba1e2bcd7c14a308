"""A tiny model with a tokenizer in a folder, and data in kvpress' schema for it."""

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.helpers.models import VOCABULARY, build

SPECIAL = ["<pad>", "<bos>", "<eos>"]
CHAT_TEMPLATE = "{{ '<bos>' }}{% for message in messages %}[{{ message['content'] }}]{% endfor %}{{ '>' }}"


def character_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character."""
    characters = [*string.printable[:95], "\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast


def half_space_llama(*, seed: int = 0) -> PreTrainedModel:
    """A tiny model whose queries lie in one half-space, as kvpress' masking needs them and trained models have them.

    Its fake key is one that every query of a group has a negative product with; random queries have none. The bias sits
    on the coordinates that rotary embedding turns least.
    """
    model = build("LlamaForCausalLM", seed=seed, attention_bias=True)
    for layer in model.model.layers:
        bias = layer.self_attn.q_proj.bias.data.view(-1, 16)
        bias[:, [6, 7, 14, 15]] = 2.0
    return model


def save_tiny_model(folder: Path, *, chat: bool = False, seed: int = 0) -> Path:
    """A random model whose greedy answers vary and sometimes end."""
    half_space_llama(seed=seed).save_pretrained(folder)
    character_tokenizer(chat=chat).save_pretrained(folder)
    return folder


def ruler_rows(n: int = 4, *, characters: int = 160) -> list[dict]:
    """Rows of two tasks; the first two share a context."""
    filler = "The quick brown fox jumps over the lazy dog while seven wizards brew tea. "
    rows = []
    for i in range(n):
        context = (f"Note {max(i, 1)}: the code is {max(i, 1) * 111}. " + filler * 9)[:characters]
        rows.append(
            {
                "context": context,
                "question": f"What is the code of note {i}? ",
                "answer_prefix": "The code is",
                "answer": [str(max(i, 1) * 111)],
                "task": ["niah_single_1", "vt"][i % 2],
                "max_new_tokens": 8,
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
