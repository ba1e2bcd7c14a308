"""``SurrogatePress``: alone, inside ``ProbabilisticPress`` and kvpress' wrappers, chunk by chunk and while decoding."""

import numpy as np
import pytest
import torch
from kvpress import AdaKVPress, ChunkPress, DecodingPress, DMSPress
from torch.nn.functional import pad
from transformers import DynamicCache

from kvpress_prob import CacheBudget, Component, MinVariancePress, ProbabilisticPress, SurrogatePress, make_press
from kvpress_prob.hf import watch_prefills
from tests.helpers.models import ARCHITECTURES, tiny_gemma3, tiny_llama, tokens
from tests.helpers.surrogates import random_surrogate


class Scores:
    """Watches a prefill and scores every layer."""

    def __init__(self, press):
        self.press, self.layers = press, {}

    def layer(self, layer):
        index = layer.module.layer_idx
        arguments = (layer.keys, layer.values, layer.attentions, layer.kwargs)
        self.layers[index] = self.press.score(layer.module, layer.hidden_states, *arguments)

    def end(self, prefill):
        self.prefill = prefill


def scores_of(model, press, ids, mask=None):
    press.post_init_from_model(model)
    scores = Scores(press)
    with watch_prefills(model, lambda: scores):
        model(ids, attention_mask=mask, past_key_values=DynamicCache())
    return scores.layers


@pytest.mark.parametrize("output", ["lookup", "reading"])
def test_scores_are_the_surrogates(output):
    model = tiny_llama()
    surrogate = random_surrogate(model)
    states = model(tokens(30), output_hidden_states=True).hidden_states
    for index, scores in scores_of(model, SurrogatePress(surrogate=surrogate, output=output), tokens(30)).items():
        entering = model.model.layers[index].input_layernorm(states[index])
        torch.testing.assert_close(scores, surrogate.log_scores(index, entering, output).exp(), rtol=1e-5, atol=0)


def test_recency_favours_the_newest_entries():
    model = tiny_llama()
    surrogate = random_surrogate(model)
    plain = SurrogatePress(surrogate=surrogate, output="reading")
    recent = SurrogatePress(surrogate=surrogate, output="reading", recency=1.5)
    assert (plain.scores_never_change, recent.scores_never_change) == (True, False)
    flat, tilted = (scores_of(model, press, tokens(30)) for press in (plain, recent))
    age = torch.arange(30, 0, -1).float()
    for index, scores in flat.items():
        torch.testing.assert_close(tilted[index], scores * age**-1.5)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3", "OLMo 2", "DeepSeek-V2", "OPT"])
def test_the_same_text_has_the_same_scores_in_any_batch_row(name):
    model = ARCHITECTURES[name].build()
    press = SurrogatePress(surrogate=random_surrogate(model))
    one, other = tokens(40), tokens(25, seed=1)
    alone = scores_of(model, press, one)
    batch = torch.cat((pad(other, (15, 0)), one))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :15] = 0
    together = scores_of(model, press, batch, mask)
    for index, scores in alone.items():
        torch.testing.assert_close(together[index][1:].log(), scores.log(), rtol=0, atol=1e-5)
    for index, scores in scores_of(model, press, other).items():
        torch.testing.assert_close(together[index][:1, :, 15:].log(), scores.log(), rtol=0, atol=1e-5)


def test_the_same_text_has_the_same_scores_chunk_by_chunk_and_token_by_token():
    model = tiny_llama()
    press = SurrogatePress(surrogate=random_surrogate(model))
    ids = tokens(40)
    whole = scores_of(model, press, ids)
    for sizes in ((16, 16, 8), (39, 1), (1,) * 40):
        cache, parts = DynamicCache(), {0: [], 1: []}

        def note(module, arguments, kwargs, output, parts=parts):
            new = kwargs["hidden_states"].shape[1]
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            keys, values = layer.keys[:, :, -new:], layer.values[:, :, -new:]
            parts[module.layer_idx].append(press.score(module, kwargs["hidden_states"], keys, values, None, kwargs))

        hooks = [layer.self_attn.register_forward_hook(note, with_kwargs=True) for layer in model.model.layers]
        for chunk in ids.split(sizes, dim=1):
            model(chunk, past_key_values=cache)
        for hook in hooks:
            hook.remove()
        for index, scores in whole.items():
            torch.testing.assert_close(torch.cat(parts[index], -1).log(), scores.log(), rtol=0, atol=1e-5)


def test_alone_it_keeps_the_largest_scores():
    model = tiny_llama()
    press = SurrogatePress(compression_ratio=0.75, surrogate=random_surrogate(model))
    dense, cache = DynamicCache(), DynamicCache()
    model(tokens(40), past_key_values=dense)
    scores = scores_of(model, press, tokens(40))
    with press(model):
        model(tokens(40), past_key_values=cache)
    for index, layer in enumerate(cache.layers):
        best = scores[index].topk(10).indices.sort().values
        wanted = dense.layers[index].keys.gather(2, best.unsqueeze(-1).expand(-1, -1, -1, 16))
        torch.testing.assert_close(layer.keys.sort(2).values, wanted.sort(2).values)


@pytest.mark.parametrize("model", [tiny_llama, tiny_gemma3, ARCHITECTURES["Qwen3"].build])
def test_inside_a_probabilistic_press(model):
    model = model()
    press = ProbabilisticPress(SurrogatePress(), compression_ratio=0.5, budget_weighting="score", seed=0)
    cache = DynamicCache()
    with press(model):
        model(tokens(60), past_key_values=cache)
    assert press.report is not None
    assert abs(press.report.achieved_ratio - 0.5) < 0.05
    assert model(tokens(1), past_key_values=cache).logits.isfinite().all()


def test_prob_learned_of_the_registry():
    model = tiny_llama()
    press = make_press("prob_learned", 0.8)
    with press(model):
        model(tokens(120), past_key_values=DynamicCache())
    assert press.report is not None
    assert abs(press.report.achieved_ratio - 0.8) < 0.02


def test_prob_learned_over_a_bounded_cache():
    model, budget = tiny_llama(), CacheBudget(96, chunk_size=32, interval=8, queries=8)
    press = make_press("prob_learned", 0.6, budget=budget)
    cache = DynamicCache()
    with press(model):
        model(tokens(240), past_key_values=cache)
    assert press.report is not None
    assert press.report.kept.double().mean() <= 96
    assert model(tokens(1), past_key_values=cache).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"compression_ratio must be given with a budget and a share that depends on"):
        make_press("prob_learned", budget=budget)
    with pytest.raises(ValueError, match="Reconstruction needs the finished prefill"):
        make_press("prob_best", 0.6, budget=budget)
    with pytest.raises(ValueError, match="budget must be None for kvzip_physical, which needs the finished prefill"):
        make_press("kvzip_physical", 0.6, budget=budget)


def test_shares_over_a_bounded_cache_are_those_of_the_whole_context():
    """What the first chunks lose never comes back, however small the context was then."""
    asked, model = [], tiny_llama()
    parts = [Component(SurrogatePress(), lambda ratio: asked.append(ratio) or 0.5), Component(MinVariancePress())]
    budget = CacheBudget(96, chunk_size=32, interval=8, queries=8)
    with ProbabilisticPress(parts, 0.6, budget=budget, seed=0)(model):
        model(tokens(240), past_key_values=DynamicCache())
    assert len(asked) > 3
    assert set(asked) == {0.6}


@pytest.mark.parametrize("wrap", [AdaKVPress, ChunkPress])
def test_inside_kvpress_wrappers(wrap):
    model = tiny_llama()
    press = wrap(SurrogatePress(0.5, random_surrogate(model)))
    cache = DynamicCache()
    with press(model):
        model(tokens(60), past_key_values=cache)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    kept = cache.layers[0].keys.shape[2]
    assert kept == (60 if wrap is AdaKVPress else 30)


def test_while_decoding_inside_dms():
    """Every token is scored once, when it comes; what leaves the window with a low score is hidden."""
    model = tiny_llama()
    surrogate = random_surrogate(model)
    threshold = float(torch.tensor(-6.0).exp())
    press = DMSPress(SurrogatePress(surrogate=surrogate), threshold=threshold, sliding_window_size=8, decoding=True)
    ids, cache, hidden = tokens(50), DynamicCache(), {0: [], 1: []}

    def note(module, arguments, kwargs):
        hidden[module.layer_idx].append(kwargs["hidden_states"])

    with press(model):
        hooks = [it.self_attn.register_forward_pre_hook(note, with_kwargs=True) for it in model.model.layers]
        for chunk in ids.split([30, *[1] * 20], dim=1):
            model(chunk, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    for index, layer in enumerate(model.model.layers):
        module, layer.self_attn.masked_key_indices = layer.self_attn.masked_key_indices, None
        low = surrogate.log_scores(index, torch.cat(hidden[index], 1), "lookup").exp() < threshold
        low[..., -8:] = False
        masked = torch.zeros_like(low)
        masked[tuple(module)] = True
        assert torch.equal(masked, low)
        assert 0 < low.sum() < low.numel()


@pytest.mark.parametrize("recency", [True, "1", -1, float("inf")])
def test_recency_is_a_finite_number(recency):
    assert SurrogatePress(recency=np.float32(0.5)).recency == 0.5
    with pytest.raises(ValueError, match="recency must be a finite number >= 0, got"):
        SurrogatePress(recency=recency)


def test_scores_of_entries_whose_hidden_states_are_gone_are_refused():
    model = tiny_llama()
    press = DecodingPress(SurrogatePress(surrogate=random_surrogate(model)), compression_interval=4, target_size=8)
    cache = DynamicCache()
    model(tokens(20), past_key_values=cache)
    with press(model):
        for token in tokens(3).split(1, dim=1):
            model(token, past_key_values=cache)
        with pytest.raises(ValueError, match="hidden_states must be those of all 24 entries that are scored, got 4"):
            model(tokens(1), past_key_values=cache)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"compression_ratio": 1.0}, ValueError, "compression_ratio must be a number in"),
        ({"output": "both"}, ValueError, r"output must be one of \('lookup', 'reading'\), got 'both'"),
        ({"recency": -1.0}, ValueError, "recency must be a finite number >= 0, got -1.0"),
        ({"surrogate": 3}, TypeError, "surrogate must be a Surrogate, a path or None, got int"),
    ],
)
def test_bad_parameters(settings, error, message):
    with pytest.raises(error, match=message):
        SurrogatePress(**settings)


def test_another_models_surrogate_is_refused_before_anything_runs():
    press = ProbabilisticPress(SurrogatePress(surrogate=random_surrogate(tiny_llama())), compression_ratio=0.5)
    model = tiny_llama(seed=1)
    with pytest.raises(ValueError, match="this model's weights"), press(model):
        pytest.fail("the block must not be entered")
