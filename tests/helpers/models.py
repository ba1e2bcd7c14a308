"""Tiny random-weight models, one per supported architecture."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

VOCABULARY = 128


def tiny_llama(
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    attn: str = "sdpa",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The scenarios' model T0 by default: vocabulary 128, hidden 64, 2 layers, 4 query heads, 2 KV heads, head_dim
    16."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return build(LlamaForCausalLM, config, attn, seed, dtype)


def tiny_gemma3(*, attn: str = "eager", sliding_window: int = 16, seed: int = 0) -> PreTrainedModel:
    """Six layers, the last one with full attention."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=sliding_window,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return build(Gemma3ForCausalLM, config, attn, seed)


def tiny_mistral(*, attn: str = "sdpa", sliding_window: int | None = 16, seed: int = 0) -> PreTrainedModel:
    """Every layer slides when ``sliding_window`` is set."""
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=sliding_window,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return build(MistralForCausalLM, config, attn, seed)


def build(cls, config, attn: str, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of random weights in evaluation mode. ``initializer_range`` is large so that attention is far from
    uniform."""
    torch.manual_seed(seed)
    model = cls._from_config(config, attn_implementation=attn, dtype=dtype)
    return model.eval()


def tokens(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
