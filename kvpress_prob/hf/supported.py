"""Which models and caches can be compressed."""

from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvpress_prob.hf.cache import RaggedLayer


def decoder_of(model: PreTrainedModel) -> Any:
    """The module whose ``layers`` hold a ``self_attn`` each.

    Raises
    ------
    TypeError
        For an architecture that cannot be compressed, as far as its structure shows it.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {name}")
    base = getattr(model, "model", model)
    # Wrappers keep the decoder in different places; some models' get_decoder() returns the whole model.
    candidates = (getattr(base, "language_model", base), model.get_decoder())
    decoder, modules = next(((it, found) for it in candidates if (found := _attention_modules(it))), (None, []))
    if decoder is None or model.config.is_encoder_decoder:
        raise TypeError(
            "model must be a decoder-only language model whose layers[i].self_attn use transformers' attention "
            f"interface, got {name}"
        )
    if any(hasattr(module, "sinks") for module in modules):
        raise TypeError(f"model must not have learned attention sinks, got {name}")
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        raise TypeError(f"model must not share keys and values between layers, got {name}")
    return decoder


def wrappers_of(model: PreTrainedModel, decoder: nn.Module) -> list[nn.Module]:
    """Modules that are called with what the model is called with, and call the decoder with embeddings of it."""
    outer = [model, getattr(model, "model", None)]
    return [it for it in outer if isinstance(it, nn.Module) and it is not decoder]


def _attention_modules(decoder: Any) -> list[Any]:
    """The self-attention of every layer, or nothing if a layer has none."""
    modules = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    return modules if all(hasattr(module, "layer_idx") and hasattr(module, "config") for module in modules) else []


def check_cache(cache: Cache | None) -> None:
    """Raise ``TypeError`` unless every layer of the cache can be compressed or left alone; ``None`` is the model's
    default cache."""
    if cache is None:
        return
    kind = type(cache).__name__
    if getattr(cache, "offloading", False):
        kind = f"offloaded {kind}"
    elif isinstance(cache, DynamicCache) and cache.layer_class_to_replicate in (None, DynamicLayer):
        layers = (DynamicLayer, DynamicSlidingWindowLayer, RaggedLayer)
        foreign = next((type(layer).__name__ for layer in cache.layers if type(layer) not in layers), None)
        if foreign is None:
            return
        kind = f"{kind} of {foreign} layers"
    raise TypeError(f"past_key_values must be a DynamicCache that is not offloaded, got {kind}")
