"""Compressing copies of one prefill."""

import pytest
import torch
from kvpress import CompactorPress, DMSPress, KnormPress, KVPressTextGenerationPipeline, ObservedAttentionPress
from transformers import DynamicCache

from kvpress_prob import PHYSICAL_PRESSES, PhysicalPress, ProbabilisticPress, make_press
from kvpress_prob.hf import RaggedLayer, cache_bytes
from kvpress_prob.prefills.attention_error import DenseQuestion, attention_errors
from kvpress_prob.prefills.compressors import compressor, draws
from kvpress_prob.prefills.decoding import RowBatch, decode_batch, decode_single
from kvpress_prob.prefills.press_spec import BASELINES, PressSpec, press_names
from kvpress_prob.prefills.shared_prefill import SharedPrefill
from tests.helpers.evaluation import character_tokenizer, half_space_llama
from tests.helpers.models import tiny_gemma3, tiny_llama, tokens
from tests.helpers.oracle import biases_of


@pytest.fixture
def shared(pipe) -> SharedPrefill:
    return SharedPrefill.run(pipe.model, tokens(160))


@pytest.mark.parametrize("ratio", [0.25, 0.8])
def test_h2o_equals_observed_attention(ratio):
    """kvpress' press needs eager attention, ours does not: the same scores, the same kept entries."""
    eager, sdpa = tiny_llama(attn="eager"), tiny_llama()
    ids = tokens(150)
    theirs = compressor(ObservedAttentionPress(), SharedPrefill.run(eager, ids)).compress(ratio, None)
    ours = compressor(BASELINES["h2o"](), SharedPrefill.run(sdpa, ids)).compress(ratio, None)
    for one, other in zip(theirs.cache.layers, ours.cache.layers, strict=True):
        torch.testing.assert_close(one.keys.sort(2).values, other.keys.sort(2).values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", press_names())
def test_copies_leave_the_prefill_alone(shared, name):
    before = [(layer.keys.clone(), layer.values.clone()) for layer in shared.prefill.cache.layers]
    one = compressor(PressSpec(name).build(), shared)
    first = one.compress(0.5, 3)
    one.compress(0.55, 4)
    for layer, (keys, values) in zip(shared.prefill.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    again = compressor(PressSpec(name).build(), shared).compress(0.5, 3)
    assert (first.layer_ratios, first.nbytes) == (again.layer_ratios, again.nbytes)
    assert first.nbytes == cache_bytes(first.cache)


@pytest.mark.parametrize("name", [name for name in press_names() if name != "no_press"])
def test_ratio_zero_is_dense(shared, name):
    done = compressor(PressSpec(name).build(), shared).compress(0.0, 0)
    assert done.layer_ratios == [0, 0]
    assert not done.masked
    assert done.nbytes == shared.nbytes
    assert not any(isinstance(layer, RaggedLayer) for layer in done.cache.layers)


def test_which_presses_draw():
    drawing = {name for name in press_names() if draws(PressSpec(name).build())}
    probabilistic = {name for name in press_names() if name.startswith("prob_")} - {"prob_kvzip"}
    assert drawing == probabilistic | {"compactor", "leverage", "random"}
    assert draws(ProbabilisticPress(CompactorPress(), sampler="top_k", correction="none"))


@pytest.mark.parametrize("name", PHYSICAL_PRESSES)
def test_physical_copies_keep_what_is_not_hidden(pipe, shared, name):
    """The masked copy and the physical one: ratios and answers are equal, bytes are not; the press itself agrees."""
    hiding = compressor(make_press(name).press, shared)
    physical = compressor(make_press(name), shared)
    question = tokens(9, seed=4)
    for ratio in (0.4, 0.8):
        masked, done = hiding.compress(ratio, None), physical.compress(ratio, None)
        assert masked.masked
        assert not done.masked
        assert done.layer_ratios == masked.layer_ratios
        assert done.nbytes == cache_bytes(done.cache) < shared.nbytes <= masked.nbytes
        want = decode_single(pipe, masked, shared.tokens, question, 12)
        assert decode_single(pipe, done, shared.tokens, question, 12).text == want.text
        press, cache = make_press(name, ratio), DynamicCache()
        with torch.no_grad(), press(pipe.model):
            pipe.model(tokens(160), past_key_values=cache)
        for layer, other in zip(cache.layers, done.cache.layers, strict=True):
            assert torch.equal(layer.store.length, other.store.length)
            assert torch.equal(layer.store.keys[: layer.store.length[0]], other.store.keys[: layer.store.length[0]])


def test_a_press_without_a_ratio_is_refused(shared):
    for press in (DMSPress(KnormPress(), -1.0), PhysicalPress(DMSPress(KnormPress(), -1.0))):
        with pytest.raises(ValueError, match="press must have a compression ratio, got DMSPress, which has a thresh"):
            compressor(press, shared)


def test_global_random_state_is_untouched(shared):
    before = torch.random.get_rng_state()
    for name in ("compactor", "prob_best", "snapkv"):
        compressor(PressSpec(name).build(), shared).compress(0.5, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["no_press", "prob_best", "prob_min"])
def test_sliding_window_layers_stay_dense(name):
    """Six layers of which one has full attention; batched and single decoding equal kvpress' pipeline."""
    pipe = KVPressTextGenerationPipeline(model=tiny_gemma3(attn="sdpa"), tokenizer=character_tokenizer())
    context, question = "One two three four five six seven. " * 3, "What? "
    inputs = pipe.preprocess(context, [question], "", 10**9)
    shared = SharedPrefill.run(pipe.model, inputs["context_ids"])
    one = compressor(PressSpec(name).build(), shared)
    rows = [one.compress(ratio, 0) for ratio in (0.3, 0.8)]
    for row in rows:
        assert len(row.layer_ratios) == 1
        assert torch.equal(row.cache.layers[0].keys, shared.prefill.cache.layers[0].keys)
    ids = inputs["questions_ids"][0]
    batched = decode_batch(pipe, RowBatch(shared, rows, 32), ids, 12)
    for ratio, row, answer in zip((0.3, 0.8), rows, batched, strict=True):
        press = PressSpec(name).build()
        if press is not None:
            press.compression_ratio = ratio
        alone = pipe(context, question=question, press=press, max_new_tokens=12)["answer"]
        assert answer.text == alone
        assert decode_single(pipe, row, shared.tokens, ids, 12).text == alone


@pytest.mark.parametrize("name", ["snapkv", "adakv_snapkv", "kvzip"])
def test_presses_that_would_compress_sliding_layers_are_refused(name):
    shared = SharedPrefill.run(tiny_gemma3(attn="sdpa"), tokens(90))
    with pytest.raises(ValueError, match="press must be one of this package's for a model with sliding-window layers"):
        compressor(PressSpec(name).build(), shared)


@pytest.mark.parametrize("name", ["prob_min_h", "prob_best", "snapkv", "adakv_snapkv", "no_press"])
def test_attention_error_against_the_oracle(name):
    """Error of the first layer, by float64 attention over the full keys with a bias per entry."""
    model = half_space_llama()
    ids, question = tokens(100), tokens(6, seed=1)
    shared = SharedPrefill.run(model, ids)
    row = compressor(PressSpec(name).build(), shared).compress(0.0 if name == "no_press" else 0.6, 0)
    inputs = DenseQuestion(shared, question)
    (error,) = attention_errors(shared, inputs, [row], 6)

    relative, absolute = [], []
    for index, attention in inputs.inputs.items():
        dense = shared.prefill.cache.layers[index]
        keys, values = (
            torch.cat([old, new[index]], 2).double().repeat_interleave(2, 1)
            for old, new in ((dense.keys, inputs.keys), (dense.values, inputs.values))
        )
        logits = attention.scaling * attention.query.double() @ keys.mT
        logits = logits.masked_fill(torch.ones(6, 106).tril(100) == 0, -torch.inf)
        output = torch.softmax(logits, -1) @ values
        difference = torch.softmax(logits + _bias(row, shared, index), -1) @ values - output
        relative.append((difference.norm(dim=-1) / output.norm(dim=-1)).mean())
        absolute.append(difference[:, :, 0].abs().mean())
    assert error.relative == pytest.approx(float(torch.stack(relative).mean()), rel=1e-4, abs=1e-6)
    assert error.absolute == pytest.approx(float(torch.stack(absolute).mean()), rel=1e-4, abs=1e-6)


def _bias(row, shared, index) -> torch.Tensor:
    """Log-weights of the context's entries, -inf on evicted and hidden ones; query heads by entries."""
    layer, t = row.cache.layers[index], shared.tokens
    if isinstance(layer, RaggedLayer):
        bias = biases_of(row.cache, shared.prefill.cache)[index]
    else:
        dense = shared.prefill.cache.layers[index].keys
        bias = torch.full(dense.shape[:3], -torch.inf)
        for head in range(dense.shape[1]):
            kept = (layer.keys[0, head].unsqueeze(1) == dense[0, head]).all(-1).any(0)
            bias[0, head, kept] = 0.0
        for module, indices in row.masked.items():
            if module.layer_idx == index:
                bias[indices] = -torch.inf
    bias = torch.nn.functional.pad(bias.double(), (0, 6)).repeat_interleave(2, 1)
    assert bias.shape == (1, 4, t + 6)
    return bias.unsqueeze(2)


@pytest.mark.parametrize("kind", ["first token", "later token", "list", "none"])
def test_end_of_sequence_by_kvpress_rules(pipe, shared, monkeypatch, kind):
    """As the first token it ends nothing; later it ends the answer; several or none are understood."""
    question = tokens(9, seed=4)
    rows = [compressor(PressSpec("prob_best").build(), shared).compress(0.5, seed) for seed in range(6)]
    monkeypatch.setattr(pipe.model.generation_config, "eos_token_id", None)
    batch = RowBatch(shared, rows, 40)
    free = [answer.text for answer in decode_batch(pipe, batch, question, 16)]
    first = [pipe.tokenizer.encode(answer.text) for answer in decode_batch(pipe, batch, question, 1)]
    ids = [pipe.tokenizer.encode(text) for text in free]
    visible = next(token for (token,) in filter(None, first))
    eos = {"first token": visible, "later token": ids[0][3], "list": [ids[0][4], ids[1][2]], "none": None}[kind]
    monkeypatch.setattr(pipe.model.generation_config, "eos_token_id", eos)
    want = [decode_single(pipe, row, shared.tokens, question, 16) for row in rows]
    got = decode_batch(pipe, batch, question, 16)
    assert [(answer.text, answer.tokens) for answer in got] == [(answer.text, answer.tokens) for answer in want]
    texts = [answer.text for answer in got]
    if kind == "first token":
        assert [text for text in texts if text.startswith(pipe.tokenizer.decode([eos])) and len(text) > 1]
    else:
        assert (kind == "none") == (free == texts)
