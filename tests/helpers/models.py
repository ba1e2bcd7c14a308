"""Tiny random-weight models: one builder a supported architecture, and the models that must be refused."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 128
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    # Large, so that attention is far from uniform.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
}
ONE_SLIDES = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers at toy size.

    Attributes
    ----------
    model : str
        Name of the class.
    settings : dict
        Differences from ``SMALL``.
    compressed : list of int
        Layers that a press compresses.
    note : str
        What is special about its attention.
    """

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    compressed: tuple[int, ...] = (0, 1)
    note: str = ""

    def build(self, attn: str = "sdpa", seed: int = 0, **settings: Any) -> PreTrainedModel:
        return build(self.model, attn, seed, **{**self.settings, **settings})


ARCHITECTURES = {
    "Llama": Architecture("LlamaForCausalLM"),
    "Mistral": Architecture("MistralForCausalLM", {"sliding_window": None}),
    "Mistral, sliding": Architecture(
        "MistralForCausalLM", {"sliding_window": 16}, (), "every layer slides: left alone"
    ),
    "Ministral": Architecture("MinistralForCausalLM", ONE_SLIDES, (1,), "one layer slides"),
    "Ministral 3": Architecture("Ministral3ForCausalLM"),
    "Mixtral": Architecture("MixtralForCausalLM", EXPERTS, note="experts"),
    "Qwen2": Architecture("Qwen2ForCausalLM", note="no head_dim in the config, biases"),
    "Qwen2, sliding": Architecture(
        "Qwen2ForCausalLM", {"use_sliding_window": True, **ONE_SLIDES}, (1,), "one layer slides"
    ),
    "Qwen2-MoE": Architecture("Qwen2MoeForCausalLM", EXPERTS, note="experts"),
    "Qwen3": Architecture("Qwen3ForCausalLM", note="QK-norm"),
    "Qwen3-MoE": Architecture("Qwen3MoeForCausalLM", EXPERTS, note="QK-norm, experts"),
    "Phi": Architecture("PhiForCausalLM", note="partial rotary embedding"),
    "Phi-3": Architecture("Phi3ForCausalLM", note="fused projection"),
    "Phi-3.5-MoE": Architecture("PhimoeForCausalLM", EXPERTS, note="experts"),
    "Gemma": Architecture("GemmaForCausalLM"),
    "Gemma 2": Architecture(
        "Gemma2ForCausalLM",
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, **ONE_SLIDES},
        (1,),
        "one layer slides; softcap under eager",
    ),
    "Gemma 3": Architecture("Gemma3ForCausalLM", ONE_SLIDES, (1,), "QK-norm; one layer slides"),
    "OLMo": Architecture("OlmoForCausalLM"),
    "OLMo 2": Architecture("Olmo2ForCausalLM", note="QK-norm over all heads"),
    "OLMo 3": Architecture("Olmo3ForCausalLM", ONE_SLIDES, (1,), "QK-norm over all heads; one layer slides"),
    "OLMoE": Architecture("OlmoeForCausalLM", EXPERTS, note="QK-norm, experts"),
    "Granite": Architecture("GraniteForCausalLM", {"attention_multiplier": 0.2}, note="scaling of its own"),
    "Granite MoE": Architecture("GraniteMoeForCausalLM", EXPERTS, note="scaling of its own, experts"),
    "SmolLM3": Architecture("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, note="one layer without positions"),
    "GLM": Architecture("GlmForCausalLM", note="interleaved partial rotary embedding"),
    "GLM-4": Architecture("Glm4ForCausalLM", note="interleaved partial rotary embedding"),
    "GLM-4.5": Architecture("Glm4MoeForCausalLM", EXPERTS, note="experts"),
    "GLM-4.7-Flash": Architecture(
        "Glm4MoeLiteForCausalLM", EXPERTS | LATENT, note="latent attention, values narrower than keys"
    ),
    "Command R": Architecture("CohereForCausalLM"),
    "Command R7B": Architecture(
        "Cohere2ForCausalLM", ONE_SLIDES, (1,), "full layer without positions; one layer slides"
    ),
    "DeepSeek-V2": Architecture(
        "DeepseekV2ForCausalLM", EXPERTS | LATENT, note="latent attention, values narrower than keys"
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3ForCausalLM", EXPERTS | LATENT, note="latent attention, values narrower than keys"
    ),
    "Llama 4": Architecture(
        "Llama4ForCausalLM",
        {
            **EXPERTS,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 64,
        },
        (1,),
        "one layer is chunked, one without positions",
    ),
    "StarCoder2": Architecture("Starcoder2ForCausalLM", {"sliding_window": None}),
    "StableLM": Architecture("StableLmForCausalLM"),
    "OPT": Architecture("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}, note="learned positions"),
    "ERNIE 4.5": Architecture("Ernie4_5ForCausalLM"),
    "Helium": Architecture("HeliumForCausalLM"),
    "EXAONE 4": Architecture("Exaone4ForCausalLM", ONE_SLIDES, (1,), "full layer without positions; one layer slides"),
    "Seed-OSS": Architecture("SeedOssForCausalLM"),
    "Apertus": Architecture("ApertusForCausalLM", note="QK-norm"),
    "Arcee": Architecture("ArceeForCausalLM"),
    "BitNet": Architecture("BitNetForCausalLM"),
    "HunYuan": Architecture("HunYuanDenseV1ForCausalLM", note="QK-norm"),
    "MiniMax-M2": Architecture("MiniMaxM2ForCausalLM", EXPERTS, note="QK-norm, experts"),
    "nanochat": Architecture("NanoChatForCausalLM", note="QK-norm"),
    "Persimmon": Architecture("PersimmonForCausalLM", note="fused projection, QK-norm"),
}
"""Every architecture that is tested against the oracle."""

OF_QUERIES = ("SnapKV", "TOVA", "Compactor", "ExpectedAttention")
"""Scorers of kvpress that compute queries themselves, by an attention module's own parts."""

UNREADABLE = {
    **dict.fromkeys(("Phi", "GLM", "GLM-4", "GLM-4.5", "Llama 4", "StableLM", "OPT"), OF_QUERIES),
    "Persimmon": (*OF_QUERIES, "LeverageScore"),
    **dict.fromkeys(("GLM-4.7-Flash", "DeepSeek-V2", "DeepSeek-V3"), (*OF_QUERIES, "LeverageScore", "LagKV")),
    "Gemma 3": ("ExpectedAttention",),
}
"""Scorers of kvpress that fail, inside kvpress, by families of ``ARCHITECTURES``."""

REFUSED = {
    "GPT-2": (Architecture("GPT2LMHeadModel"), "decoder-only language model"),
    "GPT-NeoX": (Architecture("GPTNeoXForCausalLM"), "decoder-only language model"),
    "Mamba": (Architecture("MambaForCausalLM"), "decoder-only language model"),
    "T5": (
        Architecture("T5ForConditionalGeneration", {"d_model": 64, "d_ff": 64, "d_kv": 16, "num_heads": 4}),
        "decoder-only language model",
    ),
    "BART": (
        Architecture("BartForConditionalGeneration", {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1}),
        "decoder-only language model",
    ),
    "Qwen3-Next": (
        Architecture("Qwen3NextForCausalLM", {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]}),
        "decoder-only language model",
    ),
    "LFM2": (
        Architecture("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        "decoder-only language model",
    ),
    "gpt-oss": (Architecture("GptOssForCausalLM", EXPERTS), "learned attention sinks"),
    "Gemma 3n": (
        Architecture(
            "Gemma3nForCausalLM",
            {
                "num_hidden_layers": 4,
                "layer_types": ONE_SLIDES["layer_types"] * 2,
                "sliding_window": 16,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCABULARY,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 8,
            },
        ),
        "share keys and values between layers",
    ),
    "Nemotron": (Architecture("NemotronForCausalLM"), "does not use transformers' attention interface"),
    "Doge": (Architecture("DogeForCausalLM"), "changes its attention mask"),
    "GLM-5 (sparse attention)": (
        Architecture(
            "GlmMoeDsaForCausalLM",
            {**EXPERTS, **LATENT, "qk_head_dim": 24, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
        ),
        "changes its attention mask",
    ),
    "AFMoE": (
        Architecture("AfmoeForCausalLM", {**EXPERTS, "layer_types": ONE_SLIDES["layer_types"]}),
        "must be called with the keyword past_key_values",
    ),
}
"""Architectures that must be refused, with a part of the error."""


def build(model: str, attn: str = "sdpa", seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any):
    """A model of random weights in evaluation mode; settings that its configuration does not know are dropped."""
    cls = getattr(transformers, model)
    config_class = cls.config_class
    if hasattr(config_class, "sub_configs") and "text_config" in config_class.sub_configs:
        config_class = config_class.sub_configs["text_config"]
    known = inspect.signature(config_class.__init__).parameters
    config = config_class(**{name: value for name, value in {**SMALL, **settings}.items() if name in known})
    torch.manual_seed(seed)
    return cls._from_config(config, attn_implementation=attn, dtype=dtype).eval()


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
    return build(
        "LlamaForCausalLM",
        attn,
        seed,
        dtype,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )


def tiny_gemma3(*, attn: str = "eager", sliding_window: int = 16, seed: int = 0) -> PreTrainedModel:
    """Six layers, the last one with full attention."""
    return build("Gemma3ForCausalLM", attn, seed, num_hidden_layers=6, sliding_window=sliding_window)


def tiny_mistral(*, attn: str = "sdpa", sliding_window: int | None = 16, seed: int = 0) -> PreTrainedModel:
    """Every layer slides when ``sliding_window`` is set."""
    return build("MistralForCausalLM", attn, seed, sliding_window=sliding_window)


def tokens(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: ``w3`` is token 3 and so on; ids 0 to 2 are special."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    words = {f"w{index}": index for index in range(3, VOCABULARY)}
    backend = Tokenizer(WordLevel({**special, **words}, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=8192
    )


def words(ids: torch.Tensor) -> str:
    """The text of token ids [1, length]."""
    return " ".join(f"w{index}" for index in ids.flatten().tolist())
