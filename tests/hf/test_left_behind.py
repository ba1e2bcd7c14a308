"""Nothing is left on the model, on the press or on the process: rotary state, attention names, scorers' ratios."""

import copy
import itertools
import threading

import pytest
import torch
from kvpress import CriticalKVPress, ExpectedAttentionPress, KnormPress, SnapKVPress, StreamingLLMPress
from transformers import DynamicCache, LlamaForCausalLM

from kvpress_prob import (
    AttentionPress,
    Component,
    ExpectedQueries,
    H2OPress,
    Lookahead,
    MinVariancePress,
    ProbabilisticPress,
    Reconstruction,
)
from kvpress_prob.hf import RaggedLayer
from tests.helpers.compare import assert_equals_oracle, compress, dense, press_of
from tests.helpers.models import tiny_llama, tokens
from tests.hf.test_prefill import state_of

# -- Rotary embeddings with a state -----------------------------------------------------------------------------------

LONG = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 64}
ROTARY = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, **LONG},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
}
SOURCES = {
    "rows": lambda: MinVariancePress(),
    "reconstruction": lambda: AttentionPress(Reconstruction(chunk_size=50), "max"),
    "lookahead": lambda: AttentionPress(Lookahead(2, 30)),
    "expected": lambda: AttentionPress(ExpectedQueries(), factor="norm"),
    "kvpress' expected": lambda: ExpectedAttentionPress(),
}


def rotary_model(kind, attn="sdpa"):
    config = copy.deepcopy(tiny_llama().config)
    config.max_position_embeddings = 64
    config.rope_parameters = dict(ROTARY[kind])
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation=attn).eval()


def rotary_state(model):
    module = model.model.rotary_emb
    own = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor | float | int)}
    return {**own, **{name: buffer.clone() for name, buffer in module._buffers.items()}, "type": module.rope_type}


@pytest.mark.parametrize("t", [40, 60, 100])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_state_is_what_it_was(kind, source, t):
    """Scenario S49: contexts that end before, near and past the length where frequencies are exchanged."""
    model, ids = rotary_model(kind), tokens(t)
    before = rotary_state(model)
    cache = compress(model, ids, ProbabilisticPress(SOURCES[source](), 0.5, seed=0))
    after = rotary_state(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name], name
    assert_equals_oracle(model, cache, dense(rotary_model(kind), ids), [tokens(3), tokens(1)])


@pytest.mark.parametrize("t", [40, 60])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_past_the_switch_use_the_frequencies_of_the_keys_that_they_ask(kind, t):
    """A reconstruction that reaches past the original length asks as a model would that never switches there."""
    asked = []

    class Noting(Reconstruction):
        def run(self, prefill, visit):
            def noted(layer, rows):
                asked.append(rows.query)
                return visit(layer, rows)

            super().run(prefill, noted)

    switching = rotary_model(kind)
    staying = rotary_model(kind)
    staying.model.rotary_emb.rope_type = "default"
    for model in (switching, staying):
        compress(model, tokens(t), ProbabilisticPress(AttentionPress(Noting(), "max"), 0.5, seed=0))
    half = len(asked) // 2
    for ours, theirs in zip(asked[:half], asked[half:], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_expected_queries_alone_leave_the_rotary_state():
    """Outside a block of ours, as a plain kvpress press."""
    model = rotary_model("dynamic")
    before = rotary_state(model)["inv_freq"]
    with AttentionPress(ExpectedQueries(), factor="norm", compression_ratio=0.5)(model):
        model(tokens(50), past_key_values=DynamicCache())
    assert torch.equal(rotary_state(model)["inv_freq"], before)


# -- Blocks that overlap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_on_models_that_share_a_configuration_end_in_any_order(order):
    """Scenario S50."""
    first = tiny_llama()
    models = [first, *(LlamaForCausalLM(first.config).eval() for _ in range(2))]
    assert models[1].config is first.config
    before = [state_of(model) for model in models]
    blocks = [press_of()(model) for model in models]
    for block in blocks:
        block.__enter__()
    for place, index in enumerate(order):
        blocks[index].__exit__(None, None, None)
        for still in order[place + 1 :]:
            cache = DynamicCache()
            models[still](tokens(40), past_key_values=cache)
            assert isinstance(cache.layers[0], RaggedLayer)
        cache = DynamicCache()
        models[index](tokens(40), past_key_values=cache)
        assert not isinstance(cache.layers[0], RaggedLayer)
    assert [state_of(model) for model in models] == before
    assert first.config._attn_implementation == "sdpa"


def blocked_prefill(model, press, *, layer=0, fails=False, again=None):
    """A prefill of another thread during which the block is left; the thread's cache and errors."""
    inside, left, cache, errors = threading.Event(), threading.Event(), DynamicCache(), []

    def wait(*_):
        inside.set()
        assert left.wait(30)
        if fails:
            raise RuntimeError("injected")

    handle = model.model.layers[layer].mlp.register_forward_hook(wait)

    def prefill():
        try:
            with torch.no_grad():
                model(tokens(60), past_key_values=cache)
        except Exception as error:
            errors.append(error)

    block = press(model)
    block.__enter__()
    thread = threading.Thread(target=prefill)
    thread.start()
    assert inside.wait(30)
    handle.remove()
    block.__exit__(None, None, None)
    if again is not None:
        again()
    left.set()
    thread.join()
    return cache, errors


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("layer", [0, 1])
def test_leaving_a_block_while_another_thread_prefills(attn, layer):
    """Scenario S50: what began inside is compressed, nothing is left, and the name of attention is the old one."""
    model, press = tiny_llama(attn=attn), press_of()
    before, want = state_of(model), compress(model, tokens(60), press_of())
    cache, errors = blocked_prefill(model, press, layer=layer)
    assert not errors
    assert all(map(torch.equal, (it.store.length for it in cache.layers), (it.store.length for it in want.layers)))
    assert state_of(model) == before


def test_a_new_block_may_begin_while_a_prefill_of_the_old_one_ends():
    model, other = tiny_llama(), press_of(0.8)
    before, second = state_of(model), DynamicCache()

    def again():
        with other(model):
            model(tokens(50), past_key_values=second)

    cache, errors = blocked_prefill(model, press_of(), again=again)
    assert not errors
    assert isinstance(cache.layers[1], RaggedLayer)
    assert isinstance(second.layers[1], RaggedLayer)
    assert other.report.context_lengths == [50]
    assert state_of(model) == before


def test_a_prefill_that_fails_after_its_block_was_left_leaves_nothing():
    model = tiny_llama()
    before = state_of(model)
    _, errors = blocked_prefill(model, press_of(), fails=True)
    assert [str(error) for error in errors] == ["injected"]
    model(tokens(5))
    assert state_of(model) == before
    assert not isinstance(dense(model, tokens(30)).layers[0], RaggedLayer)


# -- Scorers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [0.0, 0.3])
@pytest.mark.parametrize("ends", ["well", "with an error"])
@pytest.mark.parametrize(
    "scorer", [KnormPress, SnapKVPress, StreamingLLMPress, H2OPress, lambda r: CriticalKVPress(KnormPress(r))]
)
def test_a_scorers_own_ratio_is_what_it_was(scorer, own, ends):
    """Scenario S53."""
    scorer = scorer(own)
    press = ProbabilisticPress([Component(scorer, 0.5), Component(MinVariancePress(own))], 0.6, seed=0)
    model = tiny_llama()
    if ends == "well":
        compress(model, tokens(200), press)
    else:
        with pytest.raises(ValueError, match="use_cache must be True"), press(model):
            model(tokens(20), use_cache=False)
    assert scorer.compression_ratio == own
    assert press.press[1].press.compression_ratio == own


def test_blocks_that_share_a_scorer_restore_its_ratio_in_any_order():
    scorer = KnormPress(0.1)
    blocks = [ProbabilisticPress(scorer, ratio, seed=0)(tiny_llama()) for ratio in (0.5, 0.8)]
    for block in blocks:
        block.__enter__()
    for block in blocks:
        block.__exit__(None, None, None)
    assert scorer.compression_ratio == 0.1
