"""Floor 3: transformers. A cache layer over the ragged store, attention that reads it, and the watching of prefills."""

from kvpress_prob.hf.cache import RaggedLayer, cache_bytes, compress_layer
from kvpress_prob.hf.prefill import AttentionInputs, LayerPrefill, Prefill, attention_inputs, watch_prefills
from kvpress_prob.hf.second_pass import batch_row, repeated, scratch_copy, second_pass

__all__ = [
    "AttentionInputs",
    "LayerPrefill",
    "Prefill",
    "RaggedLayer",
    "attention_inputs",
    "batch_row",
    "cache_bytes",
    "compress_layer",
    "repeated",
    "scratch_copy",
    "second_pass",
    "watch_prefills",
]
