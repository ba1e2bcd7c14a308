"""What ``Lookahead`` samples is the model's own distribution, and where its rows, and a reconstruction's, may stand."""

import pytest
import torch
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

from kvpress_prob import AttentionPress, Lookahead, MinVariancePress, ProbabilisticPress, Reconstruction
from kvpress_prob.hf import next_logits, repeated
from tests.helpers.models import ARCHITECTURES, SMALL, build, tokens
from tests.sources.test_passes import prefill_of, rows_of

OWN_LOGITS = {
    "Llama": {},
    "Granite": {"logits_scaling": 0.3},
    "Granite MoE": {"logits_scaling": 8.0},
    "Command R": {"logit_scale": 0.0625},
    "Command R7B": {"logit_scale": 4.0},
    "Gemma 2": {"final_logit_softcapping": 0.3},
    "nanochat": {"final_logit_softcapping": 0.2},
    "OPT": {"word_embed_proj_dim": 32},
    "GLM": {},
    "DeepSeek-V3": {},
    "Llama 4": {},
}


def model_of(name, **settings):
    it = ARCHITECTURES[name]
    return build(it.model, **{**it.settings, **OWN_LOGITS[name], **settings})


@pytest.mark.parametrize("name", OWN_LOGITS)
@pytest.mark.parametrize("length", [7, 40])
def test_the_next_tokens_logits_are_the_models(name, length):
    """Scenario S51: scaling, softcap, projection."""
    model, ids = model_of(name), tokens(length)
    prefill = prefill_of(model, ids)
    got = next_logits(repeated(prefill, 2))
    want = model(ids).logits[:, -1]
    torch.testing.assert_close(got, want.expand(2, -1), atol=1e-5, rtol=1e-4)
    plain = model.get_output_embeddings()(prefill.last_hidden_state)
    if OWN_LOGITS[name] and name != "OPT":
        assert not torch.allclose(plain, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["Granite", "Gemma 2", "Command R"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_first_tokens_are_drawn_from_the_models_distribution(name, temperature):
    """Scenario S51: the law of 6,000 first tokens; every count within 4.5 standard deviations."""
    model, ids, n = model_of(name), tokens(20), 6000
    drawn, _, _ = Lookahead(n, n_tokens=1, temperature=temperature)._sample(repeated(prefill_of(model, ids), n))
    p = (model(ids).logits[0, -1].double() / temperature).softmax(-1)
    z = (drawn.flatten().bincount(minlength=len(p)) - n * p) / (n * p * (1 - p)).sqrt()
    assert z[n * p > 5].abs().max() < 4.5
    assert (n * p > 5).sum() > 3


@pytest.mark.parametrize("name", OWN_LOGITS)
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_likelihoods_are_the_models_own(name, temperature):
    """Scenario S51: of every token, at whatever temperature it was drawn."""
    model, ids = model_of(name), tokens(20)
    model.generation_config.eos_token_id = None
    source = Lookahead(3, n_tokens=6, temperature=temperature)
    drawn, total, _ = source._sample(repeated(prefill_of(model, ids), 3))
    log_p = model(torch.cat((ids.expand(3, -1), drawn), 1)).logits[:, 19:-1].log_softmax(-1)
    want = log_p.gather(-1, drawn.unsqueeze(-1)).sum((1, 2))
    torch.testing.assert_close(total, want, atol=1e-3, rtol=1e-4)


def test_a_decoder_inside_a_multimodal_model():
    settings = {**SMALL, "sliding_window": 64, "final_logit_softcapping": 0.3}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=settings, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    ids = tokens(12)
    torch.testing.assert_close(next_logits(prefill_of(model, ids)), model(ids).logits[:, -1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("source", [Lookahead(2, n_tokens=12), Reconstruction(), Reconstruction(chunk_size=9)])
def test_rows_past_a_switch_use_the_factors_of_the_keys_they_ask(kind, source):
    """Scenario S51: a context that ends before the switch of a rotary scaling, rows that reach past it. The rows' own
    first keys are those that one pass over everything with the context's frequencies gives."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    length = 32 if kind == "longrope" else 64
    model = build("LlamaForCausalLM", max_position_embeddings=64, rope_parameters=rope)
    plain = build("LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    plain.load_state_dict(model.state_dict())
    ids = tokens(length - 4)
    ours, theirs = (rows_of(source, prefill_of(it, ids)) for it in (model, plain))
    for layer in ours:
        for a, b in zip(ours[layer], theirs[layer], strict=True):
            torch.testing.assert_close(a.query, b.query, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(a.keys, b.keys, atol=1e-5, rtol=1e-4)


# -- A model's own table of positions ----------------------------------------------------------------------------------

REACHES = {
    "lookahead": (Lookahead(2, n_tokens=16), 16),
    "reconstruction": (Reconstruction(), None),
    "chunks": (Reconstruction(chunk_size=10), 10),
    "prompt": (Reconstruction(chunk_size=10, prompt=lambda ids, start: torch.full((1, 7), 5)), 17),
}


@pytest.mark.parametrize("kind", REACHES)
@pytest.mark.parametrize("table", [64, 100])
def test_positions_past_a_models_table_are_refused_before_the_prefill(kind, table):
    source, reach = REACHES[kind]
    fits = table // 2 if reach is None else table - reach
    model = build("OPTForCausalLM", **ARCHITECTURES["OPT"].settings, max_position_embeddings=table)
    press = ProbabilisticPress(AttentionPress(source=source), 0.5, seed=0)
    ran = []
    model.model.decoder.layers[0].register_forward_pre_hook(lambda module, args: ran.append(1))
    with press(model):
        model(tokens(fits), past_key_values=DynamicCache())
        assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.02)
        ran.clear()
        cache = DynamicCache()
        with pytest.raises(ValueError, match=f"positions, got a model with a table of {table}: use a shorter context"):
            model(tokens(fits + 1), past_key_values=cache)
        assert not ran
        assert cache.get_seq_length() == 0
        # A shorter row of a padded batch reaches less far.
        mask = torch.ones(2, fits, dtype=torch.long)
        mask[1, :5] = 0
        model(tokens(fits, batch=2), past_key_values=DynamicCache(), attention_mask=mask)
    with ProbabilisticPress(MinVariancePress(), 0.5, seed=0)(model):
        model(tokens(fits + 1), past_key_values=DynamicCache())


def test_embeddings_are_refused_before_the_prefill():
    model = build("LlamaForCausalLM")
    cache, ran = DynamicCache(), []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: ran.append(1))
    press = ProbabilisticPress(AttentionPress(source=Reconstruction()), 0.5)
    with press(model), pytest.raises(ValueError, match="input_ids must be given to the model for a reconstruction"):
        model(inputs_embeds=torch.randn(1, 20, 64), past_key_values=cache)
    assert not ran


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_that_generates_nothing_is_refused_before_the_prefill(architecture):
    model, cache = build(architecture), DynamicCache()
    with pytest.raises(TypeError, match=f"Lookahead needs a model that generates text, got {architecture}"):  # noqa: SIM117
        with ProbabilisticPress(AttentionPress(source=Lookahead()), 0.5)(model):
            model(tokens(60), past_key_values=cache)
    assert cache.get_seq_length() == 0
