"""Watching prefills: how a model may be called, what is refused before it runs, and that nothing is left behind."""

import gc
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
from kvpress import KnormPress, ObservedAttentionPress
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import QuantizedLayer

from kvpress_prob import H2OPress, ProbabilisticPress
from kvpress_prob.hf import RaggedLayer, watch_prefills
from kvpress_prob.hf.observing import _eager_attention
from kvpress_prob.ragged import RaggedKV, store
from tests.helpers.compare import assert_equals_oracle, compress, dense, press_of
from tests.helpers.models import tiny_gemma3, tiny_llama, tiny_mistral, tokens


class Spy:
    """A ``PrefillWatcher`` that keeps what it is shown."""

    def __init__(self):
        self.layers, self.prefill = [], None

    def layer(self, layer):
        self.layers.append(layer)

    def end(self, prefill):
        self.prefill = prefill


CALLS = {
    "keyword": lambda model, ids, cache: model(input_ids=ids, past_key_values=cache),
    "positional": lambda model, ids, cache: model(ids, None, None, cache),
    "decoder": lambda model, ids, cache: model.model(ids, past_key_values=cache),
    "embeddings": lambda model, ids, cache: model(
        inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache
    ),
    "tuple": lambda model, ids, cache: model(ids, past_key_values=cache, return_dict=False),
    "use_cache": lambda model, ids, cache: model(ids, past_key_values=cache, use_cache=False),
    "mask": lambda model, ids, cache: model(ids, torch.ones_like(ids), past_key_values=cache),
    "bool mask": lambda model, ids, cache: model(ids, torch.ones_like(ids).bool(), past_key_values=cache),
    "additive mask": lambda model, ids, cache: model(
        ids, torch.full((1, 1, 60, 60), torch.finfo(torch.float32).min).triu(1), past_key_values=cache
    ),
    "attentions": lambda model, ids, cache: model(ids, past_key_values=cache, output_attentions=True),
}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("call", CALLS)
def test_ways_of_calling_the_model(call, attn):
    """Scenario S33."""
    model, ids, cache, press = tiny_llama(attn=attn), tokens(60), DynamicCache(), press_of()
    with press(model):
        CALLS[call](model, ids, cache)
    assert all(isinstance(layer, RaggedLayer) for layer in cache.layers)
    assert_equals_oracle(model, cache, dense(model, ids), [tokens(3, seed=1)])


def test_the_cache_that_the_model_makes_itself_is_compressed():
    model, press = tiny_llama(), press_of()
    for use_cache in (True, None):
        with press(model):
            cache = model(tokens(60), use_cache=use_cache).past_key_values
        assert all(isinstance(layer, RaggedLayer) for layer in cache.layers)


def test_without_a_cache_is_refused_before_the_model_runs():
    model, ran = tiny_llama(), []
    model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(True))
    with pytest.raises(ValueError, match="use_cache must be True"), press_of()(model):
        model(tokens(8), use_cache=False)
    model.config.use_cache = False
    with pytest.raises(ValueError, match="use_cache must be True"), press_of()(model):
        model(tokens(8))
    assert not ran


def test_gradient_checkpointing_drops_the_cache_and_is_refused():
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    model.train()
    with torch.enable_grad(), pytest.raises(ValueError, match="use_cache must be True"), press_of()(model):
        model(tokens(8))


class Offloaded(DynamicCache):
    """What ``DynamicCache(offloading=True)`` is; making one needs an accelerator."""

    def __init__(self):
        super().__init__()
        self.offloading = True


class Quantized(QuantizedLayer):
    """transformers' quantized layer, without the packages that quantize."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, q_tensor):
        return q_tensor


def quantized_dynamic_cache():
    cache = DynamicCache()
    cache.layers = [Quantized(), Quantized()]
    return cache


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda: StaticCache(tiny_llama().config, max_cache_len=64), "got StaticCache"),
        (lambda: Cache(layers=[Quantized(), Quantized()]), "got Cache"),
        (quantized_dynamic_cache, "got DynamicCache of Quantized layers"),
        (Offloaded, "got offloaded Offloaded"),
        (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "got EncoderDecoderCache"),
        (lambda: ((torch.zeros(1), torch.zeros(1)),), "got tuple"),
    ],
    ids=["static", "quantized", "quantized layers", "offloaded", "encoder-decoder", "tuple"],
)
def test_caches_that_cannot_be_compressed_are_refused_before_the_model_runs(cache, message):
    """Scenario S21."""
    model, ran = tiny_llama(), []
    model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(True))
    with pytest.raises(TypeError, match=f"past_key_values must be a DynamicCache .*{message}"), press_of()(model):
        model(tokens(8), past_key_values=cache())
    assert not ran


MASKS = {
    "right padding": torch.tensor([[1, 1, 1, 0]]),
    "hole": torch.tensor([[1, 0, 1, 1]]),
    "nothing": torch.zeros(1, 4),
    "too long": torch.ones(1, 6),
    "one-dimensional": torch.ones(4),
    "packed documents": torch.block_diag(torch.ones(2, 2).tril(), torch.ones(2, 2).tril()).bool()[None, None],
    "sliding": torch.ones(4, 4).tril().triu(-1).bool()[None, None],
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_that_are_not_left_padding_are_refused_before_the_model_runs(mask):
    model, ran = tiny_llama(), []
    model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(True))
    with pytest.raises(NotImplementedError, match="attention_mask of a prefill must"), press_of()(model):
        model(tokens(4), attention_mask=MASKS[mask])
    assert not ran


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_left_padding_in_a_mask_for_every_pair(attn):
    model, ids, press = tiny_llama(attn=attn), tokens(20, batch=2), press_of()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    pairs = torch.ones(20, 20, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    if attn == "eager":
        pairs = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    flat, full = compress(model, ids, press, attention_mask=mask), compress(model, ids, press, attention_mask=pairs)
    assert press.report.context_lengths == [20, 12]
    for a, b in zip(flat.layers, full.layers, strict=True):
        assert torch.equal(a.store.length, b.store.length)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_recorded_queries_are_the_ones_the_model_attends_with(attn):
    model, ids = tiny_llama(attn=attn, layers=1), tokens(12)
    spy = Spy()
    with watch_prefills(model, lambda: spy):
        hidden = model.model(ids, output_hidden_states=True)
    (layer,) = spy.layers
    inputs = layer.kwargs["attention_inputs"]
    logits = inputs.scaling * inputs.query @ layer.keys.repeat_interleave(2, 1).mT
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    attention = torch.softmax(logits.masked_fill(~causal, -torch.inf), -1) @ layer.values.repeat_interleave(2, 1)
    block, embedded = model.model.layers[0], hidden.hidden_states[0]
    after = embedded + block.self_attn.o_proj(attention.transpose(1, 2).flatten(2))
    after = after + block.mlp(block.post_attention_layernorm(after))
    torch.testing.assert_close(model.model.norm(after), hidden.last_hidden_state, atol=1e-5, rtol=1e-5)
    assert torch.equal(spy.prefill.input_ids, ids)
    assert spy.prefill.cache is hidden.past_key_values


def test_later_passes_inside_the_block_are_not_prefills():
    model, cache, press = tiny_llama(), DynamicCache(), press_of()
    with press(model):
        model(tokens(60), past_key_values=cache)
        report = press.report
        with pytest.warns(UserWarning, match="30 tokens that follow 60 in a cache are kept whole"):
            model(tokens(30, seed=1), past_key_values=cache)
        assert press.report is report
        assert cache.get_seq_length() == 90
        second = DynamicCache()
        model(tokens(40), past_key_values=second)
    assert press.report.context_lengths == [40]


def test_queries_of_later_passes_are_not_kept():
    model, cache, references = tiny_llama(), DynamicCache(), []

    def note(module, args, output):
        references.append(weakref.ref(output))

    with press_of()(model):
        model(tokens(60), past_key_values=cache)
        model.model.layers[0].self_attn.q_proj.register_forward_hook(note)
        with pytest.warns(UserWarning, match="are kept whole"):
            model(tokens(30, seed=1), past_key_values=cache)
        gc.collect()
        assert [reference() for reference in references] == [None]


def test_a_model_without_full_attention_warns():
    model, press = tiny_mistral(), press_of()
    with pytest.warns(UserWarning, match="every layer of MistralForCausalLM has a sliding window: nothing is evicted"):
        cache = compress(model, tokens(40), press)
    assert press.report.layers == []
    assert press.report.achieved_ratio == 0
    assert "0 layers" in str(press.report)
    full = dense(model, tokens(40))
    assert torch.equal(model(tokens(3), past_key_values=cache).logits, model(tokens(3), past_key_values=full).logits)


# -- Nothing is left behind ------------------------------------------------------------------------------------------


def state_of(model):
    """All that a press could leave on a model: hooks, attributes, submodules and the attention's name."""
    return [
        (
            name,
            sorted(set(vars(module)) - {"masked_key_indices"}),  # set by kvpress' attention wrapper, to None
            sorted(module._modules),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    ]


def test_a_block_leaves_the_model_as_it_was():
    model = tiny_llama()
    logits, before = model(tokens(30)).logits, state_of(model)
    compress(model, tokens(60), press_of())
    assert state_of(model) == before
    assert torch.equal(model(tokens(30)).logits, logits)


class Stage:
    """Raises ``error`` at one place of a prefill."""

    def __init__(self, monkeypatch, error):
        self.monkeypatch, self.error, self.calls = monkeypatch, error, 0

    def boom(self, *args, **kwargs):
        raise self.error

    def second_call_of(self, function):
        def wrapped(*args, **kwargs):
            self.calls += 1
            if self.calls == 2:
                raise self.error
            return function(*args, **kwargs)

        return wrapped

    def embedding(self, model, press):
        return model.model.embed_tokens.register_forward_hook(self.boom)

    def first_attention(self, model, press):
        return model.model.layers[0].self_attn.register_forward_hook(self.boom)

    def last_mlp(self, model, press):
        return model.model.layers[1].mlp.register_forward_pre_hook(self.boom)

    def model_end(self, model, press):
        return model.model.norm.register_forward_hook(self.boom)

    def head(self, model, press):
        return model.lm_head.register_forward_hook(self.boom)

    def score(self, model, press):
        self.monkeypatch.setattr(press.press, "score", self.second_call_of(press.press.score), raising=False)

    def draw(self, model, press):
        self.monkeypatch.setattr("kvpress_prob.presses.compressing.draw", self.boom)

    def packing(self, model, press):
        self.monkeypatch.setattr(RaggedKV, "pack", self.second_call_of(RaggedKV.pack))

    def allocation(self, model, press):
        self.monkeypatch.setattr(store, "_layout", self.second_call_of(store._layout))

    def entering(self, model, press):
        self.monkeypatch.setattr(model.model, "register_forward_hook", self.boom)

    def press_setup(self, model, press):
        self.monkeypatch.setattr(press.press, "post_init_from_model", self.boom, raising=False)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("injected"), KeyboardInterrupt(), torch.OutOfMemoryError("injected")],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize(
    "stage", [name for name in vars(Stage) if name[0] != "_" and name not in ("boom", "second_call_of")]
)
def test_an_interrupt_at_any_stage_leaves_the_model_as_it_was(monkeypatch, stage, error):
    """Scenario S14."""
    model, press, ids = tiny_llama(), press_of(), tokens(60)
    logits, before = model(ids).logits, state_of(model)
    want = compress(model, ids, press).layers[1].store.segment(0, 1)[0]
    with monkeypatch.context() as patch:
        handle = getattr(Stage(patch, error), stage)(model, press)
        with pytest.raises(type(error)), press(model):
            model(ids)
        if handle is not None:
            handle.remove()
    assert state_of(model) == before
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(compress(model, ids, press).layers[1].store.segment(0, 1)[0], want)


def test_an_error_inside_a_block_does_not_end_it():
    model, press = tiny_llama(), press_of()
    handle = model.model.layers[1].register_forward_pre_hook(Stage(None, RuntimeError("injected")).boom)
    with press(model):
        with pytest.raises(RuntimeError, match="injected"):
            model(tokens(60))
        handle.remove()
        other = dense(model, tokens(10), use_cache=True)
        cache = DynamicCache()
        model(tokens(50), past_key_values=cache)
    assert press.report.context_lengths == [50]
    assert isinstance(other.layers[0], RaggedLayer)


def test_the_report_of_an_earlier_context_is_not_mistaken_for_a_new_one():
    model, press = tiny_llama(), press_of()
    compress(model, tokens(60), press)
    with press(model):
        assert press.report is None


# -- Presses inside presses, models beside models ----------------------------------------------------------------------


def test_nested_blocks_on_one_model_are_refused_and_the_outer_goes_on():
    model, outer, inner = tiny_llama(), press_of(0.5), press_of(0.9)
    with outer(model):
        with pytest.raises(ValueError, match="already inside a `with press"), inner(model):
            pass
        model(tokens(60))
    assert outer.report.context_lengths == [60]
    assert inner.report is None


def test_two_models_at_once():
    first, second = tiny_llama(), tiny_llama(seed=1)
    a, b = press_of(0.5), press_of(0.8)
    with a(first), b(second):
        caches = [DynamicCache(), DynamicCache()]
        for model, cache in zip((first, second), caches, strict=True):
            model(tokens(60), past_key_values=cache)
    for model, cache, press in zip((first, second), caches, (press_of(0.5), press_of(0.8)), strict=True):
        alone = compress(model, tokens(60), press)
        assert torch.equal(cache.layers[0].store.length, alone.layers[0].store.length)
    assert (a.report.target_ratio, b.report.target_ratio) == (0.5, 0.8)


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_another_press_that_prunes_the_same_cache_is_refused(order):
    model, ours, other = tiny_llama(), press_of(), KnormPress(0.3)
    first, second = (other, ours) if order == "outside" else (ours, other)
    logits = model(tokens(20)).logits
    with (
        pytest.raises(ValueError, match="must hold all 60 tokens of the prefill, got 42: another press"),
        first(model),
        second(model),
    ):
        model(tokens(60))
    assert torch.equal(model(tokens(20)).logits, logits)


def test_kvpress_presses_leave_a_compressed_cache_alone():
    model = tiny_llama()
    cache, same = compress(model, tokens(60), press_of()), compress(model, tokens(60), press_of())
    with KnormPress(0.5)(model):
        inside = model(tokens(5), past_key_values=cache).logits
    assert torch.equal(inside, model(tokens(5), past_key_values=same).logits)


def test_attention_weights_reach_the_scorers_that_need_them():
    model = tiny_llama(attn="eager")
    press = ProbabilisticPress(ObservedAttentionPress(), 0.5, seed=0)
    cache = compress(model, tokens(60), press, output_attentions=True)
    same = compress(model, tokens(60), ProbabilisticPress(H2OPress(average=True), 0.5, seed=0))
    for a, b in zip(cache.layers, same.layers, strict=True):
        assert torch.equal(a.store.length, b.store.length)


# -- Threads -----------------------------------------------------------------------------------------------------------


def test_a_thread_that_decodes_during_anothers_prefill():
    """Scenario of two users of one model: one compresses while the other decodes, both get what they get alone."""
    model = tiny_llama()
    shared, alone = compress(model, tokens(60), press_of()), compress(model, tokens(60), press_of())
    want = [model(tokens(1, seed=step), past_key_values=alone).logits for step in range(4)]
    got = []

    def decode():
        with torch.no_grad():
            got.extend(model(tokens(1, seed=step), past_key_values=shared).logits for step in range(4))

    class Interrupted(H2OPress):
        def score(self, *args, **kwargs):
            thread = threading.Thread(target=decode)
            if not got:
                thread.start()
                thread.join()
            return super().score(*args, **kwargs)

    cache = compress(model, tokens(80), ProbabilisticPress(Interrupted(), 0.5, seed=0))
    plain = compress(model, tokens(80), ProbabilisticPress(H2OPress(), 0.5, seed=0))
    assert len(got) == 4
    assert all(map(torch.equal, got, want))
    assert torch.equal(cache.layers[1].store.length, plain.layers[1].store.length)


def test_a_block_covers_prefills_of_other_threads():
    """``generate`` often runs in a thread of its own, for streaming."""
    model, press, result = tiny_llama(), press_of(), []

    def generate():
        result.append(model.generate(tokens(60), max_new_tokens=4, do_sample=False, eos_token_id=None))

    with press(model):
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    assert press.report.context_lengths == [60]
    with press_of()(model):
        assert torch.equal(model.generate(tokens(60), max_new_tokens=4, do_sample=False, eos_token_id=None), result[0])


def test_two_threads_prefill_in_one_block():
    model, caches = tiny_llama(), [DynamicCache(), DynamicCache()]
    barrier = threading.Barrier(2)

    def prefill(index):
        barrier.wait()
        with torch.no_grad():
            for _ in range(5):
                caches[index] = DynamicCache()
                model(tokens(60 + 20 * index), past_key_values=caches[index])

    with press_of()(model):
        threads = [threading.Thread(target=prefill, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, cache in enumerate(caches):
        alone = compress(model, tokens(60 + 20 * index), press_of())
        for a, b in zip(cache.layers, alone.layers, strict=True):
            assert torch.equal(a.store.length, b.store.length)


# -- Plain caches, drift ---------------------------------------------------------------------------------------------


def test_plain_caches_are_bit_identical_before_and_after_the_package_is_used():
    script = """
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
models = [LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation=attn).eval()
          for attn in ("sdpa", "eager")]
ids = torch.arange(3, 43)[None]
def run():
    results = []
    for model in models:
        cache = DynamicCache()
        with torch.no_grad():
            results += [model(ids, past_key_values=cache).logits, model(ids[:, :5], past_key_values=cache).logits]
    return results
before = run()
import kvpress_prob
after_import = run()
for model in models:
    with torch.no_grad(), kvpress_prob.make_press("prob_best", 0.5)(model):
        model(ids)
after_use = run()
assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(before, after_import, after_use))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_eager_attention_of_a_subclass_in_another_file():
    attention = type(tiny_llama().model.layers[0].self_attn)
    subclass = type("Mine", (attention,), {})
    model = tiny_llama(attn="eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = subclass
    assert_equals_oracle(model, compress(model, tokens(40), press_of()), dense(model, tokens(40)), [tokens(3)])
    with pytest.raises(TypeError, match="no eager_attention_forward beside Linear"):
        _eager_attention(nn.Linear(1, 1))


@pytest.mark.parametrize("keyword", ["past_key_values", "attention_mask"])
def test_a_renamed_keyword_is_not_swallowed(keyword):
    """Scenario S31: attention modules take ``**kwargs``, so transformers could rename an argument unnoticed."""

    def rename(module, args, kwargs):
        return args, {**{k: v for k, v in kwargs.items() if k != keyword}, f"{keyword}_2": kwargs[keyword]}

    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.forward = partial(layer.self_attn.forward, attention_mask=None)
        layer.self_attn.register_forward_pre_hook(rename, with_kwargs=True)
    with pytest.raises(TypeError, match=f"must be called with the keyword {keyword}"):
        compress(model, tokens(20), press_of())


def test_only_sdpa_and_eager_can_be_entered():
    model = tiny_llama()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"attn_implementation in \('sdpa', 'eager'\), got 'flex_attention'"):
        compress(model, tokens(8), press_of())


def test_what_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        compress(nn.Linear(1, 1), tokens(8), press_of())
    with (
        pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"),
        watch_prefills(nn.Linear(1, 1), Spy),
    ):
        pass


def test_the_ratio_is_over_full_attention_layers():
    """Scenario S19."""
    model, press = tiny_gemma3(), press_of(0.5)
    cache = compress(model, tokens(40), press)
    assert press.report.layers == [5]
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.03)
    assert sum(isinstance(layer, RaggedLayer) for layer in cache.layers) == 1
