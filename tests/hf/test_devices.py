"""What needs a GPU: a model on two devices, and the same seed on both."""

import pytest
import torch
from torch import nn

from kvpress_prob import DecodingBudget
from kvpress_prob.maths.draw import SAMPLERS, draw
from tests.helpers.compare import compress, press_of
from tests.helpers.models import tiny_llama, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the CPU")


def to(value, device: str):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(to(part, device) for part in value) if isinstance(value, tuple) else value


def split(model, device: str = "cuda"):
    """Move the last layer to another device; what goes in and out of it moves as well."""
    layer: nn.Module = model.model.layers[-1].to(device)
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: (to(args, device), {name: to(value, device) for name, value in kwargs.items()}),
        with_kwargs=True,
    )
    layer.register_forward_hook(lambda _, args, output: to(output, "cpu"))
    return model


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("decoding", [None, DecodingBudget(max_entries=40, interval=8, queries=8)])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_layers_on_different_devices(attn, ratio, decoding, padding):
    """Scenario S29: all of a layer's data is on its device, and the logits are those of one device."""
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :padding] = 0
    results = []
    for model in (tiny_llama(attn=attn), split(tiny_llama(attn=attn))):
        cache = compress(model, tokens(40, batch=2), press_of(ratio, decoding=decoding), attention_mask=mask)
        longer = mask
        for step in range(20):
            longer = nn.functional.pad(longer, (0, 1), value=1)
            ids = tokens(1, batch=2, seed=step)
            results.append(model(ids, past_key_values=cache, attention_mask=longer).logits)
    if ratio or decoding:
        store = cache.layers[-1].store
        devices = {it.device.type for it in (store.keys, store.values, store.log_w, store.start, store.length)}
        assert devices == {"cuda"}
    for got, want in zip(results[20:], results[:20], strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_draws_the_same_on_every_device(sampler):
    """Scenarios S11 and S12: the draw takes its random numbers from a CPU generator."""
    weights = torch.rand(4, 90, dtype=torch.float64)
    before = torch.cuda.get_rng_state()
    results = [
        draw(
            weights.to(device),
            torch.zeros(4, 90, dtype=torch.bool, device=device),
            torch.zeros(4, dtype=torch.int64, device=device),
            keep_fraction=0.4,
            sampler=sampler,
            correction="inclusion",
            temperature=1.0,
            budget_weighting="uniform",
            generator=torch.Generator().manual_seed(3),
        )
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(results[0].kept, results[1].kept.cpu())
    torch.testing.assert_close(results[0].log_w, results[1].log_w.cpu())
    assert torch.equal(torch.cuda.get_rng_state(), before)
