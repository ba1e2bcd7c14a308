"""A model on two devices, and the same seed on both: the CPU and a GPU. Without a GPU both are the CPU, which shows
only that these tests still run."""

import pytest
import torch
from torch import nn

from kvpress_prob import CacheBudget
from kvpress_prob.maths.draw import SAMPLERS, DrawSettings, Proposal, draw
from kvpress_prob.maths.random import streams
from tests.helpers.compare import compress, press_of
from tests.helpers.models import tiny_llama, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def moved(value, device: str):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(moved(part, device) for part in value) if isinstance(value, tuple) else value


def split(model):
    """Move the last layer to the other device; what goes in and out of it moves as well."""
    layer: nn.Module = model.model.layers[-1].to(DEVICE)
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: (moved(args, DEVICE), {name: moved(value, DEVICE) for name, value in kwargs.items()}),
        with_kwargs=True,
    )
    layer.register_forward_hook(lambda _, args, output: moved(output, "cpu"))
    return model


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("budget", [None, CacheBudget(max_entries=40, interval=8, queries=8, start="decoding")])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_layers_on_different_devices(attn, ratio, budget, padding):
    """Scenario S29: all of a layer's data is on its device, and the logits are those of one device."""
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :padding] = 0
    results = []
    for model in (tiny_llama(attn=attn), split(tiny_llama(attn=attn))):
        cache = compress(model, tokens(40, batch=2), press_of(ratio, budget=budget), attention_mask=mask)
        longer = mask
        for step in range(20):
            longer = nn.functional.pad(longer, (0, 1), value=1)
            ids = tokens(1, batch=2, seed=step)
            results.append(model(ids, past_key_values=cache, attention_mask=longer).logits)
    if ratio or budget:
        store = cache.layers[-1].store
        devices = {it.device.type for it in (store.keys, store.values, store.log_w, store.start, store.length)}
        assert devices == {DEVICE}
    for got, want in zip(results[20:], results[:20], strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_draws_the_same_on_every_device(sampler):
    """Scenarios S11 and S12: random numbers are hashed from whole numbers."""
    weights = torch.rand(4, 90, dtype=torch.float64)
    state = torch.cuda.get_rng_state if DEVICE == "cuda" else torch.get_rng_state
    before = state()
    results = [
        draw(
            [Proposal(weights.to(device))],
            torch.zeros(4, 90, dtype=torch.bool, device=device),
            torch.zeros(4, dtype=torch.int64, device=device),
            keep_fraction=0.4,
            settings=DrawSettings(sampler, "none" if sampler == "top_k" else "inclusion"),
            stream=streams(3, torch.arange(4, device=device)),
        )
        for device in ("cpu", DEVICE)
    ]
    assert torch.equal(results[0].kept, results[1].kept.cpu())
    torch.testing.assert_close(results[0].log_w, results[1].log_w.cpu())
    assert torch.equal(state(), before)
