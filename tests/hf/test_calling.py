"""Any way to call a model works as it does dense: precision, devices, modes, compiled models, chunks, positions."""

import copy
import pickle

import numpy as np
import pytest
import torch
from kvpress import KnormPress
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from kvpress_prob import (
    AttentionPress,
    CacheBudget,
    Component,
    ExpectedQueries,
    H2OPress,
    Lookahead,
    MinVariancePress,
    PrefillRows,
    ProbabilisticPress,
    Reconstruction,
    load_compressed,
    save_compressed,
)
from kvpress_prob.hf import RaggedLayer
from kvpress_prob.hf.validity import position_after
from tests.helpers.compare import assert_equals_oracle, compress, dense, greedy, press_of
from tests.helpers.models import ARCHITECTURES, SMALL, tiny_llama, tokens
from tests.helpers.oracle import biases_of, oracle_attention

PRESSES = {
    "rows": lambda: press_of(),
    "counts": lambda: press_of(sampler="multinomial", correction="counts", uniform_mix=0.1),
    "reconstruction": lambda: ProbabilisticPress(
        [Component(AttentionPress(Reconstruction(chunk_size=40), "max"), 0.5, "score"), Component(H2OPress())],
        0.5,
        seed=0,
    ),
    "lookahead": lambda: ProbabilisticPress(
        AttentionPress(Lookahead(2, 6), "output_change"), 0.5, seed=0, uniform_mix=0.2
    ),
    "expected": lambda: ProbabilisticPress(AttentionPress(ExpectedQueries(), factor="norm"), 0.5, seed=0, n_sink=4),
}


def lengths(cache):
    return [layer.store.length for layer in cache.layers]


# -- What is not compressed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [20, 33])
def test_chunks_are_said_not_to_be_compressed(chunk):
    """Scenario S42: one warning a block."""
    model = tiny_llama()
    settings = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": chunk}
    with pytest.warns(UserWarning, match=f"{chunk} tokens that follow {chunk} in a cache are kept whole") as warned:  # noqa: SIM117
        with press_of()(model):
            model.generate(tokens(100), **settings)
    assert len(warned) == 1


@pytest.mark.parametrize("first", [1, 40])
def test_a_context_on_top_of_a_cached_beginning_is_said_not_to_be_compressed(first):
    """Scenario S42."""
    model, ids, press = tiny_llama(), tokens(100), press_of()
    cache = dense(model, ids[:, :first])
    with pytest.warns(UserWarning, match=f"{100 - first} tokens that follow {first} in a cache are kept whole"):  # noqa: SIM117
        with press(model):
            model(ids[:, first:], past_key_values=cache)
    assert press.report is None
    torch.testing.assert_close(cache.layers[0].keys, dense(model, ids).layers[0].keys, atol=1e-5, rtol=1e-5)


def test_answers_and_a_press_without_a_budget_do_not_warn():
    model, ids = tiny_llama(), tokens(60)
    with press_of()(model):
        model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    with press_of(0.0)(model):
        cache = dense(model, ids)
        model(tokens(9), past_key_values=cache)


@pytest.mark.parametrize("name", ["reconstruction", "lookahead"])
def test_passes_of_the_press_itself_do_not_warn(name):
    compress(tiny_llama(), tokens(90), PRESSES[name]())


# -- Compiled models --------------------------------------------------------------------------------------------------


def compiled_whole(model):
    return torch.compile(model, backend="eager"), model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model, model


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model, model


def compiled_decoder(model):
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    return model, model


def compiled_part(model):
    model.model = torch.compile(model.model, backend="eager")
    return model, model


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(
    "how",
    [compiled_whole, compiled_in_place, compiled_forward, compiled_decoder, compiled_part],
    ids=lambda it: it.__name__,
)
def test_compiled_models_are_compressed(how, used_before):
    """Scenario S43."""
    torch._dynamo.reset()
    want = compress(tiny_llama(), tokens(60), press_of())
    called, model = how(tiny_llama())
    if used_before:
        called(tokens(60))
    for entered in (called, model):
        cache = DynamicCache()
        with press_of()(entered):
            called(tokens(60), past_key_values=cache)
        assert all(isinstance(layer, RaggedLayer) for layer in cache.layers)
        assert all(map(torch.equal, lengths(cache), lengths(want)))
    # Afterwards it is compiled as before.
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch.testing.assert_close(called(tokens(30)).logits, tiny_llama()(tokens(30)).logits, atol=1e-5, rtol=1e-5)


# -- Precision and devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "OLMo 2", "Gemma 2"])
def test_autocast(name, dtype, attn):
    """Scenario S44: inside and outside autocast, whatever dtypes the projections come out with."""
    model, ids = ARCHITECTURES[name].build(attn), tokens(60)
    plain = compress(model, ids, press_of())
    with torch.autocast("cpu", dtype):
        cache = compress(model, ids, press_of())
        full = dense(model, ids)
        inside = model(tokens(3, seed=1), past_key_values=copy.deepcopy(cache)).logits
        model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
    outside = model(tokens(3, seed=1), past_key_values=cache).logits
    torch.testing.assert_close(inside.float(), outside.float(), atol=0.1, rtol=0.1)
    for got, same in zip(cache.layers, plain.layers, strict=True):
        if isinstance(got, RaggedLayer):
            assert int((got.store.length - same.store.length).abs().sum()) <= 0.2 * int(same.store.length.sum())
    assert full.get_seq_length() == 60


@pytest.mark.parametrize("name", PRESSES)
def test_autocast_of_every_source(name):
    model = tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        cache = compress(model, tokens(90), PRESSES[name]())
        assert torch.isfinite(model(tokens(2), past_key_values=cache).logits).all()


@torch.no_grad()
@pytest.mark.parametrize("offset", [50, 1000])
def test_expected_queries_come_after_the_context_wherever_it_begins(offset):
    """Rotary attention knows distances alone."""
    model, kept = tiny_llama(), []
    for begin in (0, offset):
        press = ProbabilisticPress(AttentionPress(source=ExpectedQueries(n_future_positions=64)), 0.5, seed=0)
        with press(model):
            positions = begin + torch.arange(90).unsqueeze(0)
            model(tokens(90), position_ids=positions, past_key_values=DynamicCache())
        kept.append(press.report.kept)
    assert torch.equal(*kept)


def test_a_gradient_through_a_compressed_cache_is_refused():
    """Nothing is said of calls whose gradients nobody asks for."""
    model = tiny_llama()
    cache = compress(model, tokens(90), next(iter(PRESSES.values()))())
    with torch.enable_grad():
        embeds = model.get_input_embeddings()(tokens(5)).detach().requires_grad_()
        logits = model(inputs_embeds=embeds, past_key_values=cache).logits
        with pytest.raises(NotImplementedError, match="no gradients flow through a compressed KV cache"):
            logits[:, -1].sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scorer", [KnormPress(), MinVariancePress()])
def test_the_default_dtype_changes_no_bounded_cache(dtype, scorer, tmp_path):
    model, got = tiny_llama(), []
    before = torch.get_default_dtype()
    for default in (before, dtype):
        torch.set_default_dtype(default)
        try:
            press = ProbabilisticPress(scorer, budget=CacheBudget(96, interval=8, queries=8), seed=0)
            cache = DynamicCache()
            with torch.no_grad(), press(model):
                for _ in range(3):
                    model(tokens(80), past_key_values=cache)
            save_compressed(cache, tmp_path / "cache.safetensors")
            cache = load_compressed(tmp_path / "cache.safetensors")
            with torch.no_grad():
                got.append(model(tokens(20), past_key_values=cache).logits)
        finally:
            torch.set_default_dtype(before)
    assert torch.equal(*got)


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(name, dtype):
    """Scenario S45."""
    model, ids = tiny_llama(), tokens(90)
    want = compress(model, ids, PRESSES[name]())
    logits = model(tokens(4, seed=1), past_key_values=copy.deepcopy(want)).logits
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = compress(model, ids, PRESSES[name]())
        same = model(tokens(4, seed=1), past_key_values=copy.deepcopy(got)).logits
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got.layers, want.layers, strict=True):
        assert torch.equal(a.store.length, b.store.length)
        assert a.store.log_w.dtype == torch.float32
        torch.testing.assert_close(a.store.segment(0, 1)[2], b.store.segment(0, 1)[2])
    torch.testing.assert_close(same, logits)


@pytest.mark.parametrize("name", PRESSES)
def test_the_default_device_changes_nothing(name):
    """Scenario S45: whatever is made without saying where would be on the meta device here, and could not be read."""
    model, ids, more = tiny_llama(), tokens(90), tokens(4, seed=1)
    want = compress(model, ids, PRESSES[name]())
    press, cache, mask = PRESSES[name](), DynamicCache(), torch.ones(1, 90, dtype=torch.long)
    positions = torch.arange(90)[None]
    with torch.device("meta"), press(model):
        model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions, cache_position=positions[0])
    assert all(map(torch.equal, lengths(cache), lengths(want)))
    model(more, past_key_values=cache)


# -- Inference mode ---------------------------------------------------------------------------------------------------


COPIES = {
    "deepcopy": lambda cache, path: copy.deepcopy(cache),
    "pickle": lambda cache, path: pickle.loads(pickle.dumps(cache)),
    "file": lambda cache, path: load_compressed(path),
    "twice": lambda cache, path: pickle.loads(pickle.dumps(copy.deepcopy(cache))),
}


@pytest.mark.parametrize("settings", [{}, {"sampler": "multinomial", "correction": "counts"}])
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("how", COPIES)
def test_copies_made_in_inference_mode_are_appended_to_outside(how, made_inside, settings, tmp_path):
    """Scenario S46."""
    model, ids = tiny_llama(), tokens(60)
    with torch.inference_mode(made_inside):
        cache = compress(model, ids, press_of(**settings))
    save_compressed(cache, tmp_path / "cache")
    with torch.inference_mode():
        copied = COPIES[how](cache, tmp_path / "cache")
    want = greedy(model, cache, tokens(3), 40)
    assert torch.equal(greedy(model, copied, tokens(3), 40), want)
    copied.crop(70)
    model(tokens(2), past_key_values=copied)


# -- Outputs, numbers, arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("where", ["call", "configuration", "decoder"])
def test_tuples_in_place_of_objects(name, where):
    """Scenario S47."""
    model, ids, cache = tiny_llama(), tokens(90), DynamicCache()
    want = compress(model, ids, PRESSES[name]())
    if where == "configuration":
        model.config.return_dict = False
    with PRESSES[name]()(model):
        if where == "call":
            output = model(ids, past_key_values=cache, return_dict=False)
        elif where == "decoder":
            output = model.model(ids, past_key_values=cache, return_dict=False)
        else:  # of transformers 5.2, the decoder alone understands it
            output = model.model(ids, past_key_values=cache)
    assert isinstance(output, tuple)
    assert all(map(torch.equal, lengths(cache), lengths(want)))


@pytest.mark.parametrize("seed", [2**70, -(2**64), True, 1.0, "1", np.float64(2)])
def test_seeds_that_are_none_are_refused(seed):
    """Scenario S54."""
    with pytest.raises(ValueError, match="seed must be"):
        ProbabilisticPress(MinVariancePress(), 0.5, seed=seed)
    with pytest.raises(ValueError, match="seed must be"):
        Lookahead(seed=seed)


def test_numpy_numbers_are_numbers(tmp_path):
    """Scenario S54."""
    model, ids = tiny_llama(), tokens(60)
    press = ProbabilisticPress(
        MinVariancePress(max_rows=np.int32(30)),
        np.float32(0.5),
        n_sink=np.int64(2),
        temperature=np.float64(1),
        seed=np.int64(3),
    )
    cache = compress(model, ids, press)
    save_compressed(cache, tmp_path / "cache", report=press.report)
    same = compress(model, ids, ProbabilisticPress(MinVariancePress(max_rows=30), 0.5, n_sink=2, seed=3))
    assert all(map(torch.equal, lengths(load_compressed(tmp_path / "cache")), lengths(same)))
    for ratio in (True, np.float32("nan"), np.float64(1)):
        with pytest.raises(ValueError, match="compression_ratio must be a number"):
            ProbabilisticPress(MinVariancePress(), ratio)


def test_the_source_comes_first():
    """Scenario S63."""
    source = Reconstruction(chunk_size=7)
    press = AttentionPress(source, "max")
    assert (press.source, press.statistic, press.compression_ratio) == (source, "max", 0.0)
    assert AttentionPress(PrefillRows(), compression_ratio=0.3).compression_ratio == 0.3


def test_three_dimensional_positions_of_a_plain_decoder_end_where_the_oracle_says():
    """Scenario S48: [3, b, t], and [4, b, t] with text positions first; the next token follows the largest."""
    ids = tokens(5, batch=2)
    plain = torch.arange(5).expand(2, -1)
    assert position_after(None, ids).tolist() == [5, 5]
    assert position_after(plain[:1], ids).tolist() == [5, 5]
    axes = torch.stack([plain, plain + 3, plain - 1])
    assert position_after(axes, ids).tolist() == [8, 8]
    assert position_after(torch.cat([plain[None] + 50, axes]), ids).tolist() == [8, 8]


def test_a_decoder_inside_an_oracle_of_its_own_positions():
    model, ids = tiny_llama(), tokens(40)
    cache, full = DynamicCache(), DynamicCache()
    positions = torch.arange(7, 47)[None]
    with press_of()(model):
        model(ids, past_key_values=cache, position_ids=positions)
    model(ids, past_key_values=full, position_ids=positions)
    assert_equals_oracle(model, cache, full, [tokens(2)])


# -- Multimodal wrappers ----------------------------------------------------------------------------------------------

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def gemma3():
    config = Gemma3Config(
        text_config=ARCHITECTURES["Gemma 3"].build().config.to_dict(),
        vision_config=VISION | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=99,
    )
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


def qwen2_vl():
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 1, "mlp_ratio": 1, "patch_size": 4}
    special = {"image_token_id": 99, "video_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96}
    torch.manual_seed(0)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    return Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


WRAPPERS = {"Gemma 3": gemma3, "Qwen2-VL": qwen2_vl}


@pytest.mark.parametrize("name", ["rows", "reconstruction", "lookahead"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("padding", [0, 12])
def test_wrappers_without_an_image(wrapper, name, padding):
    """Scenario S48: positions of several dimensions, and second passes find the tokens that the wrapper was given."""
    model, ids, cache, press = WRAPPERS[wrapper](), tokens(60, batch=2) % 90 + 3, DynamicCache(), PRESSES[name]()
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :padding] = 0
    with press(model):
        output = model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    assert press.report.context_lengths == [60, 60 - padding]
    assert any(isinstance(layer, RaggedLayer) for layer in cache.layers)
    full = model(input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(output.logits, full.logits)


def test_positions_of_qwen2_vl_are_followed():
    """Scenario S48: [4, b, t], as the wrapper hands them over with an image before the text."""
    model, ids, cache, full = qwen2_vl(), tokens(40), DynamicCache(), DynamicCache()
    axes = torch.arange(40).expand(3, 1, -1).clone()
    axes[:, :, 10:] -= 6  # an image takes more tokens than positions
    positions = torch.cat([torch.arange(40).expand(1, 1, -1), axes])
    seen = []

    class Noting(H2OPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen.append(kwargs["position_embeddings"])
            return super().score(module, hidden_states, keys, values, attentions, kwargs)

    text = model.model.language_model
    with ProbabilisticPress([Component(Noting(), 0.5), Component(MinVariancePress())], 0.5, seed=0)(model):
        text(input_ids=ids, position_ids=positions, past_key_values=cache)
    text(input_ids=ids, position_ids=positions, past_key_values=full)
    assert len(seen) == 2
    more = torch.arange(34, 37).expand(3, 1, -1)
    biases = biases_of(cache, full)
    got = text(input_ids=tokens(3), position_ids=more, past_key_values=cache).last_hidden_state
    with oracle_attention(model, biases):
        want = text(input_ids=tokens(3), position_ids=more, past_key_values=full).last_hidden_state
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_an_image_is_refused_before_a_second_pass():
    """Scenario S48: tokens that stand for an image cannot be repeated."""
    model, ids, ran = gemma3(), tokens(20) % 90 + 3, []
    ids[:, 4:8] = 99
    pixels = torch.zeros(1, 3, 28, 28)
    model.model.language_model.layers[0].register_forward_hook(lambda *_: ran.append(True))
    with pytest.raises(ValueError, match="input_ids must be given"), PRESSES["reconstruction"]()(model):
        model(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == 99).long())
    assert not ran
    cache = DynamicCache()
    with PRESSES["rows"]()(model):
        model(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == 99).long(), past_key_values=cache)
    assert any(isinstance(layer, RaggedLayer) for layer in cache.layers)
