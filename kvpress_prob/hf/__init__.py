"""Floor 3: transformers. A cache layer over the ragged store, attention that reads it, and the watching of prefills."""

from kvpress_prob.hf.bounding import bound_passes
from kvpress_prob.hf.budget import CacheBudget
from kvpress_prob.hf.cache import RaggedLayer, reads_of
from kvpress_prob.hf.enclosing import (
    HiddenEntries,
    enclosed_prefills,
    evict_hidden,
    full_attention_layers,
    take_hidden,
)
from kvpress_prob.hf.observing import AttentionInputs, attention_inputs
from kvpress_prob.hf.packing import bytes_of, bytes_per_token, cache_bytes, compress_layer
from kvpress_prob.hf.passes import batch_row, continued, next_logits, one_more, repeated, second_pass
from kvpress_prob.hf.pool import PoolSettings
from kvpress_prob.hf.prefill import LayerPrefill, Prefill, Upcoming
from kvpress_prob.hf.resampling import ResamplingSettings
from kvpress_prob.hf.saving import load_compressed, read_header, save_compressed
from kvpress_prob.hf.settling import settle
from kvpress_prob.hf.supported import decoder_of
from kvpress_prob.hf.watching import watch_prefills

__all__ = [
    "AttentionInputs",
    "CacheBudget",
    "HiddenEntries",
    "LayerPrefill",
    "PoolSettings",
    "Prefill",
    "RaggedLayer",
    "ResamplingSettings",
    "Upcoming",
    "attention_inputs",
    "batch_row",
    "bound_passes",
    "bytes_of",
    "bytes_per_token",
    "cache_bytes",
    "compress_layer",
    "continued",
    "decoder_of",
    "enclosed_prefills",
    "evict_hidden",
    "full_attention_layers",
    "load_compressed",
    "next_logits",
    "one_more",
    "read_header",
    "reads_of",
    "repeated",
    "save_compressed",
    "second_pass",
    "settle",
    "take_hidden",
    "watch_prefills",
]
