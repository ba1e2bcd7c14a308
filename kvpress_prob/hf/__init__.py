"""Floor 3: transformers. A cache layer over the ragged store, attention that reads it, and the watching of prefills."""

from kvpress_prob.hf.cache import RaggedLayer, cache_bytes, compress_layer
from kvpress_prob.hf.enclosing import (
    HiddenEntries,
    enclosed_prefills,
    evict_hidden,
    full_attention_layers,
    take_hidden,
)
from kvpress_prob.hf.prefill import AttentionInputs, LayerPrefill, Prefill, attention_inputs, watch_prefills
from kvpress_prob.hf.resampling import DecodingBudget, ResamplingSettings
from kvpress_prob.hf.saving import load_compressed, read_header, save_compressed
from kvpress_prob.hf.second_pass import batch_row, repeated, scratch_copy, second_pass

__all__ = [
    "AttentionInputs",
    "DecodingBudget",
    "HiddenEntries",
    "LayerPrefill",
    "Prefill",
    "RaggedLayer",
    "ResamplingSettings",
    "attention_inputs",
    "batch_row",
    "cache_bytes",
    "compress_layer",
    "enclosed_prefills",
    "evict_hidden",
    "full_attention_layers",
    "load_compressed",
    "read_header",
    "repeated",
    "save_compressed",
    "scratch_copy",
    "second_pass",
    "take_hidden",
    "watch_prefills",
]
