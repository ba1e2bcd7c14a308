"""``AttentionPress``: the same statistic from the right source is a published method's score."""

import math

import pytest
import torch
from kvpress import ExpectedAttentionPress, KVzipPress, SnapKVPress, TOVAPress
from torch.nn.functional import pad
from transformers import DynamicCache

from kvpress_prob import (
    AttentionPress,
    Component,
    ExpectedQueries,
    Lookahead,
    MinVariancePress,
    PrefillRows,
    ProbabilisticPress,
    Reconstruction,
    make_press,
)
from kvpress_prob.hf import AttentionInputs, LayerPrefill
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.prefills.shared_prefill import SharedPrefill
from kvpress_prob.sources import LayerSource, kvzip_prompt
from tests.helpers.evaluation import half_space_llama, save_tiny_model
from tests.helpers.models import ARCHITECTURES, tiny_llama, tokens
from tests.presses.test_scorers import captured_scores


def window(scores, n):
    """kvpress' protection of the newest ``n`` entries."""
    return pad(scores[..., :-n], (0, n), value=scores[..., :-n].max().item() + 1)


PUBLISHED = {
    "SnapKV": (
        AttentionPress(source=PrefillRows("uniform", window=16)),
        SnapKVPress(window_size=16, kernel_size=1),
        lambda scores: window(scores, 16),
    ),
    "TOVA": (
        AttentionPress(source=PrefillRows("last"), heads="layer"),
        TOVAPress(),
        lambda scores: window(scores, 1),
    ),
    "ExpectedAttention": (
        AttentionPress(source=ExpectedQueries(max_rows=None), factor="norm"),
        ExpectedAttentionPress(),
        lambda scores: pad(scores[..., 4:], (4, 0), value=scores[..., 4:].max().item() + 1),
    ),
}


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Phi-3"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_scorers_are_combinations(name, architecture):
    ours, theirs, protected = PUBLISHED[name]
    model, ids = ARCHITECTURES[architecture].build(), tokens(90)
    got = captured_scores(model, ours, ids)
    want = captured_scores(model, theirs, ids)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(protected(a), b, atol=1e-5, rtol=1e-3)
        # So top-k keeps the same entries.
        assert torch.equal(protected(a).topk(45).indices.sort().values, b.topk(45).indices.sort().values)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "chat"])
def pipe(request, tmp_path_factory):
    return load_pipeline(str(save_tiny_model(tmp_path_factory.mktemp("model"), chat=request.param)))


def kvzip_scores(model, ids, chunk_size, monkeypatch):
    """What kvpress' KVzip scores before it selects."""
    kept = {}

    def keep(self, model):
        kept["scores"] = self.score_val

    monkeypatch.setattr(KVzipPress, "compress_post", keep)
    with KVzipPress(0.5, chunk_size=chunk_size)(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    return kept["scores"]


@pytest.mark.parametrize("chunk_size", [2048, 40])
def test_reconstruction_scores_are_those_of_kvzip(pipe, chunk_size, monkeypatch):
    ids = tokens(90, seed=3)
    prompt, skip = kvzip_prompt(pipe.tokenizer)
    assert skip == (2 if pipe.tokenizer.chat_template else 0)
    want = kvzip_scores(pipe.model, ids, chunk_size, monkeypatch)
    press = AttentionPress(source=Reconstruction(chunk_size, prompt=prompt, skip=skip, n_sink=4), statistic="max")
    seen = []
    original = press.score_context
    press.score_context = lambda prefill: seen.extend(original(prefill)) or seen
    with ProbabilisticPress(press, 0.5, budget_weighting="score", seed=0)(pipe.model):
        pipe.model(ids, past_key_values=DynamicCache())
    for ours, theirs in zip(seen, want, strict=True):
        # Sinks are protected in both, whatever their score.
        torch.testing.assert_close(ours[..., 4:], theirs[..., 4:], atol=1e-3, rtol=1e-3)
        assert ours.max() > 0.1


def test_top_k_over_them_keeps_what_kvzip_keeps(pipe, monkeypatch):
    """KVzip's selection, with memory that drops: the largest of all heads and layers, sinks protected."""
    ids = tokens(90, seed=3)
    prompt, skip = kvzip_prompt(pipe.tokenizer)
    scores = kvzip_scores(pipe.model, ids, 2048, monkeypatch)
    scores[..., :4] = scores.max() + 1
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.flatten().topk(scores.numel() // 2).indices] = True
    source = Reconstruction(prompt=prompt, skip=skip, n_sink=4)
    press = ProbabilisticPress(
        AttentionPress(source=source, statistic="max"),
        0.5,
        sampler="top_k",
        correction="none",
        budget_weighting="score",
        n_sink=4,
    )
    cache, dense = DynamicCache(), DynamicCache()
    with press(pipe.model):
        pipe.model(ids, past_key_values=cache)
    pipe.model(ids, past_key_values=dense)
    for index, wanted in enumerate(kept.view(2, 2, 90)):
        for head in range(2):
            got = cache.layers[index].store.segment(0, head)[0]
            torch.testing.assert_close(got, dense.layers[index].keys[0, head, wanted[head]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_it_works_in_the_pipeline_in_the_block_and_in_generate(attn):
    """Three ways of calling, one result."""
    ids = tokens(60)
    press = ProbabilisticPress(AttentionPress(source=Reconstruction(), statistic="max"), 0.5, seed=0)
    model = tiny_llama(attn=attn)
    block, generated = DynamicCache(), DynamicCache()
    with press(model):
        model(ids, past_key_values=block)
    with press(model):
        out = model.generate(ids, past_key_values=generated, max_new_tokens=6, do_sample=False)
    assert out.shape[1] == 66
    for a, b in zip(block.layers, generated.layers, strict=True):
        assert int(a.store.length.sum()) + 2 * 5 == int(b.store.length.sum())
        assert torch.equal(a.store.segment(0, 0)[0], b.store.segment(0, 0)[0][: a.store.length[0]])


def test_a_fraction_of_the_rows_scores_almost_the_same():
    """Expected queries from a sample of the rows: near the whole, and equal when the sample is the whole."""
    model, ids = tiny_llama(), tokens(300)
    whole = captured_scores(model, AttentionPress(source=ExpectedQueries(max_rows=None)), ids)
    same = captured_scores(model, AttentionPress(source=ExpectedQueries(max_rows=300)), ids)
    half = captured_scores(model, AttentionPress(source=ExpectedQueries(max_rows=150)), ids)
    for a, b, c in zip(whole, same, half, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert torch.corrcoef(torch.stack((a.flatten(), c.flatten())))[0, 1] > 0.9


@pytest.mark.parametrize("max_rows", [None, 7, 1000])
def test_expected_queries_are_spread_over_the_whole_context(max_rows):
    """Queries that are their own positions: the mean of evenly spread ones is the middle."""
    t = 104
    query = torch.arange(t, dtype=torch.float32).view(1, 1, t, 1).expand(1, 2, t, 4)
    keys = torch.randn(1, 1, t, 4)
    layer = LayerPrefill(
        torch.nn.Module(), keys, keys, keys, None, {"attention_inputs": AttentionInputs(query, 1.0, None)}
    )
    rows = ExpectedQueries(n_sink=4, max_rows=max_rows).rows(layer)
    torch.testing.assert_close(rows.query, torch.full((1, 2, 1, 4), (4 + t - 1) / 2), atol=0.1, rtol=0)


def test_alone_a_press_with_a_pass_says_where_it_works():
    model = tiny_llama()
    with (
        pytest.raises(NotImplementedError, match="Reconstruction makes a pass over the finished prefill"),
        AttentionPress(source=Reconstruction(), compression_ratio=0.5)(model),
    ):
        model(tokens(30), past_key_values=DynamicCache())
    press = AttentionPress()
    assert isinstance(press.source, LayerSource)
    with pytest.raises(NotImplementedError, match=r"PrefillRows scores one layer at a time: use score\(\)"):
        press.score_context(None)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"source": "prefill"}, TypeError, r"source must be a query source with rows\(\) or run\(\), got str"),
        ({"statistic": "median"}, ValueError, "statistic must be one of .*, got 'median'"),
        ({"factor": "value"}, ValueError, "factor must be one of .*, got 'value'"),
        ({"heads": "model"}, ValueError, "heads must be one of .*, got 'model'"),
        ({"statistic": "output_change", "factor": "norm"}, ValueError, "'output_change' has its own factor"),
        ({"project": 1}, TypeError, "project must be True or False, got 1"),
        ({"project": True}, ValueError, "project=True needs statistic='output_change', got statistic='mean'"),
        ({"compression_ratio": 1.0}, ValueError, r"compression_ratio must be a number in \[0, 1\), got 1.0"),
    ],
)
def test_bad_parameters(settings, error, message):
    with pytest.raises(error, match=message):
        AttentionPress(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": "first"}, "prior must be one of .*, got 'first'"),
        ({"max_rows": 0}, "max_rows must be None or an integer >= 1, got 0"),
        ({"window": -1}, "window must be None or an integer >= 1, got -1"),
    ],
)
def test_bad_prefill_rows(settings, message):
    with pytest.raises(ValueError, match=message):
        PrefillRows(**settings)


def two(share=0.5, rest=None, **kwargs):
    return [
        Component(AttentionPress(source=Reconstruction(), statistic="max"), share, **kwargs),
        Component(MinVariancePress(), rest),
    ]


@pytest.mark.parametrize("sampler", ["systematic", "multinomial"])
@pytest.mark.parametrize("allocation", ["global", "layer", "head"])
def test_components_share_one_budget(sampler, allocation):
    model, ids = tiny_llama(), tokens(300)
    press = ProbabilisticPress(two(budget_weighting="score"), 0.6, sampler=sampler, allocation=allocation, seed=0)
    with press(model):
        model(ids, past_key_values=DynamicCache())
    assert press.report.achieved_ratio == pytest.approx(0.6, abs=0.004 if sampler == "systematic" else 0.03)
    assert press.report.settings.startswith("AttentionPress + MinVariancePress, ")


def test_a_component_with_the_whole_share_is_the_press_alone():
    model, ids = tiny_llama(), tokens(100)
    caches = []
    for press in (MinVariancePress(), two(0.0, 1.0), [Component(MinVariancePress())]):
        caches.append(DynamicCache())
        with ProbabilisticPress(press, 0.5, seed=3)(model):
            model(ids, past_key_values=caches[-1])
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        stores = [layer.store for layer in layers]
        for store in stores[1:]:
            assert torch.equal(store.length, stores[0].length)
            assert torch.equal(store.segment(0, 1)[2], stores[0].segment(0, 1)[2])


def test_a_share_may_depend_on_the_ratio():
    press = ProbabilisticPress(two(lambda ratio: max(0.5, ratio)), 0.5, seed=0)
    press.compression_ratio = 0.9
    model, cache = tiny_llama(), DynamicCache()
    with press(model):
        model(tokens(200), past_key_values=cache)
    assert press.report.achieved_ratio == pytest.approx(0.9, abs=0.01)
    with pytest.raises(ValueError, match=r"share of the components must be in \[0, 1\] and sum to 1"):
        ProbabilisticPress(two(lambda ratio: 2 * ratio), 0.9)


def test_what_one_component_protects_is_kept_and_drawn_by_none():
    model, cache = tiny_llama(), DynamicCache()
    press = ProbabilisticPress(
        [Component(SnapKVPress(window_size=8), 0.5), Component(MinVariancePress(), 0.5)], 0.8, seed=0
    )
    with press(model):
        model(tokens(100), past_key_values=cache)
    dense = DynamicCache()
    model(tokens(100), past_key_values=dense)
    for ours, theirs in zip(cache.layers, dense.layers, strict=True):
        for head in range(2):
            keys, _, log_w = ours.store.segment(0, head)
            assert torch.equal(keys[-8:], theirs.keys[0, head, -8:])
            assert (log_w[-8:] == 0).all()


def test_r_0_makes_no_pass():
    class Forbidden:
        def run(self, prefill, visit):
            raise AssertionError("a pass was made")

    model, cache = tiny_llama(), DynamicCache()
    with ProbabilisticPress(AttentionPress(source=Forbidden()))(model):
        model(tokens(30), past_key_values=cache)
    assert cache.layers[0].keys.shape[2] == 30


@pytest.mark.parametrize(
    ("press", "settings", "error", "message"),
    [
        ([], {}, TypeError, r"press must be a ScorerPress or a list of Component, got \[\]"),
        ([MinVariancePress()], {}, TypeError, "press must be a ScorerPress or a list of Component"),
        ([Component("min")], {}, TypeError, "press must be a kvpress ScorerPress, got str"),
        (two(0.7, 0.7), {}, ValueError, r"share of the components must .* got \[0.7, 0.7\]"),
        (two(None), {}, ValueError, r"None for at most one of them, got \[None, None\]"),
        (two(1.5), {}, ValueError, r"share must be a number in .0, 1., got 1.5"),
        (two(budget_weighting="none"), {}, ValueError, "budget_weighting must be one of .*, got 'none'"),
        (two(proposal_temperature=0), {}, ValueError, "proposal_temperature must be a number > 0, got 0"),
        (two(), {"budget_weighting": "score"}, ValueError, "budget_weighting must be given to each Component"),
        (two(), {"proposal_temperature": 2}, ValueError, "proposal_temperature must be given to each Component"),
        (two(), {"max_weight": 0.5}, ValueError, "max_weight must be a number >= 1, got 0.5"),
        (two(), {"max_weight": math.nan}, ValueError, "max_weight must be a number >= 1, got nan"),
        (
            two(),
            {"sampler": "top_k"},
            ValueError,
            "sampler='top_k' needs correction='none', got correction='inclusion'",
        ),
        (
            two(),
            {"sampler": "top_k", "correction": "none"},
            ValueError,
            "sampler='top_k' draws nothing and takes one component, got 2",
        ),
    ],
)
def test_bad_components(press, settings, error, message):
    with pytest.raises(error, match=message):
        ProbabilisticPress(press, **settings)


def deleted(query, keys, values, scaling):
    """Change [hq n t] of every row's output [hq n dv] when one entry after the other is left out, one softmax each."""
    logits = scaling * query @ keys.mT
    t = keys.shape[1]
    outputs = torch.softmax(logits, -1) @ values
    changes = []
    for entry in range(t):
        left = [index for index in range(t) if index != entry]
        changes.append(torch.softmax(logits[..., left], -1) @ values[:, left] - outputs)
    return torch.stack(changes, 2)  # [hq n t dv]


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Granite", "DeepSeek-V3"])
def test_projected_output_change_is_deletion_behind_the_projection(architecture):
    """Brute force in float64, through the model's own o_proj: the last rows of a prefill, and rows of a pass."""
    model, ids = ARCHITECTURES[architecture].build().double(), tokens(30)
    settings = {"statistic": "output_change", "project": True}
    for press in (
        AttentionPress(source=PrefillRows("last"), **settings),
        AttentionPress(source=Lookahead(1, 1), **settings),
    ):
        seen = {}

        def visit(layer, rows, seen=seen):
            seen[layer] = rows
            return rows.statistic_and_output("mean")[1]

        shared = SharedPrefill.run(model, ids)
        if press.needs_pass:
            scores = press.score_context(shared.prefill)
            press.source.run(shared.prefill, visit)
        else:
            scores = [
                press.score(it.module, it.hidden_states, it.keys, it.values, it.attentions, it.kwargs)
                for it in shared.layers
            ]
            seen = {it.module.layer_idx: press.source.rows(it) for it in shared.layers}
        for index, got in zip(shared.prefill.layers, scores, strict=True):
            rows, module = seen[index], model.model.layers[index].self_attn
            group = rows.query.shape[1] // rows.keys.shape[1]
            keys, values = (x[0].double().repeat_interleave(group, 0) for x in (rows.keys, rows.values))
            change = deleted(rows.query[0].double(), keys, values, rows.scaling)[:, :, :30]
            heads, width = change.shape[0], change.shape[-1]
            cost = []
            for head in range(heads):
                alone = change.new_zeros(*change.shape[1:3], heads * width)
                alone[..., head * width : (head + 1) * width] = change[head]
                cost.append(torch.nn.functional.linear(alone, module.o_proj.weight).norm(dim=-1).mean(0))
            want = torch.stack(cost).view(-1, group, 30).mean(1)
            torch.testing.assert_close(got[0], want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("Phi", "needs attention modules with an o_proj of floating-point weights, got PhiAttention"),
        ("OPT", "needs attention modules with an o_proj of floating-point weights, got OPTAttention"),
        ("BitNet", "needs o_proj right behind the heads, got BitNetAttention with a norm between them"),
    ],
)
def test_models_without_a_readable_projection_are_refused_before_they_run(architecture, message):
    model = ARCHITECTURES[architecture].build()
    for press in (make_press("lore", 0.5), AttentionPress(statistic="output_change", project=True)):
        with pytest.raises(ValueError, match=message):
            press(model).__enter__()


@pytest.mark.parametrize("name", ["lore", "prob_lore"])
def test_lore_keeps_as_many_entries_in_every_head(name):
    model, cache = half_space_llama(), DynamicCache()
    press = make_press(name, 0.7)
    with press(model):
        model(tokens(100), past_key_values=cache)
    assert (press.report.kept - 30).abs().max() <= (name == "prob_lore")
    weights = cache.layers[0].store.segment(0, 0)[2]
    assert bool((weights > 0).any()) == (name == "prob_lore")


def test_lookahead_scores_by_output_change():
    model, cache = tiny_llama(), DynamicCache()
    press = ProbabilisticPress(
        AttentionPress(source=Lookahead(2, 4), statistic="output_change"), 0.5, budget_weighting="score", seed=0
    )
    with press(model):
        model(tokens(60), past_key_values=cache)
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.02)
