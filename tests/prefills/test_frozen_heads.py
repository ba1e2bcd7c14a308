"""Frozen-head diagnostics: their rows are the model's own attention, their columns what they are called."""

import pandas as pd
import pytest
import torch

from kvpress_prob.maths.forced_weights import EXTRA
from kvpress_prob.prefills.frozen_heads import diagnose_heads
from tests.helpers.models import tiny_gemma3, tiny_llama, tiny_mistral, tokens


@pytest.fixture(scope="module")
def measured():
    model = tiny_llama(attn="eager")
    ids = tokens(70)
    with torch.no_grad():
        return model, ids, diagnose_heads(model, ids, rows=3, budgets=(4,), draws=3)


def test_rows_are_the_model_s_attention(measured):
    """Errors of top mass from the weights that eager attention returns."""
    model, ids, table = measured
    attentions = model(ids, output_attentions=True).attentions
    cache = model(ids, use_cache=True).past_key_values
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    assert len(table) == config.num_hidden_layers * config.num_attention_heads * 3
    for row in table.itertuples():
        p = attentions[row.layer][0, row.head, row.position].double()
        assert (p[row.position + 1 :] == 0).all()
        values = cache.layers[row.layer].values[0, row.head // group].double()
        kept = p.topk(4).indices
        error = (p[kept] @ values[kept] / p[kept].sum() - p @ values).norm().item()
        assert row.top == pytest.approx(error, rel=1e-4, abs=1e-6)
        assert row.dropped == pytest.approx(1 - p[kept].sum().item(), abs=1e-5)
        assert row.phi == pytest.approx(error * p[kept].sum().item(), rel=1e-4, abs=1e-6)


def test_columns_keep_their_order(measured):
    _, _, table = measured
    assert (table["best"] <= table["balanced"]).all()
    assert (table["balanced"] <= table["top"]).all()
    assert ((table["swaps"] == 0) == (table["balanced"] == table["top"])).all()
    assert (table["kappa"] >= 1).all()
    assert ((table["closable"] - (1 - table["best"] / table["top"])).abs() < 1e-12).all()
    assert (table["position"] >= 4 + EXTRA[4] - 1).all()
    positions = table.groupby("layer")["position"].unique().map(sorted)
    assert (positions.map(len) == 3).all()
    assert not table.isna().any(axis=None)
    assert (table["vote"] > 0).all()


def test_vote_of_a_group(measured):
    """All heads of a group keep the same keys: recomputed from the eager weights."""
    model, ids, table = measured
    attentions = model(ids, output_attentions=True).attentions
    cache = model(ids, use_cache=True).past_key_values
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for row in table.itertuples():
        first = row.head // group * group
        p = attentions[row.layer][0, first : first + group, row.position].double()
        kept = p.sum(0).topk(4).indices
        own, values = p[row.head - first], cache.layers[row.layer].values[0, row.head // group].double()
        want = (own[kept] @ values[kept] / own[kept].sum() - own @ values).norm().item()
        assert row.vote == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_seeds(measured):
    model, ids, table = measured
    again = diagnose_heads(model, ids, rows=3, budgets=(4,), draws=3)
    pd.testing.assert_frame_equal(again, table)
    other = diagnose_heads(model, ids, rows=3, budgets=(4,), draws=3, seed=1)
    assert other["position"].tolist() != table["position"].tolist()


def test_softcapped_and_windowed_layers():
    """Full-attention layers alone are diagnosed, with the attention that the model has."""
    model = tiny_gemma3()
    full = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    table = diagnose_heads(model, tokens(60), rows=2, budgets=(4,), draws=1)
    assert sorted(table["layer"].unique()) == full


def test_stops_where_the_attention_is_another():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] + 0.01,))
    with pytest.raises(RuntimeError, match=r"layer 0: attention computed .* within 0.004, got a difference of 0.01"):
        diagnose_heads(model, tokens(60), rows=2, budgets=(4,), draws=1)


def test_nothing_stays_on_the_model(measured):
    model, _, _ = measured
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_refusals():
    model = tiny_llama()
    for changed, message in (
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"draws": 0}, "draws must be at least 1, got 0"),
        ({"budgets": (5,)}, r"budgets must be different ones among \[4, 8, 16, 32\], got \[5\]"),
        ({"budgets": ()}, "budgets must be different ones"),
        ({"budgets": (4, 4)}, "budgets must be different ones"),
        ({"rows": 40}, "context must have at least 68 tokens for these budgets, got 60"),
    ):
        with pytest.raises(ValueError, match=message):
            diagnose_heads(model, tokens(60), **{"budgets": (4,), **changed})
    with pytest.raises(TypeError, match="model must have attention modules with an o_proj, got Linear"):
        diagnose_heads(torch.nn.Linear(2, 2), tokens(60), budgets=(4,))
    with pytest.raises(ValueError, match="model must have layers with full attention, got MistralForCausalLM with"):
        diagnose_heads(tiny_mistral(), tokens(60), budgets=(4,))
