"""Every architecture against the oracle; unsupported ones are refused with one error."""

import kvpress
import pytest
import torch
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

from kvpress_prob import ProbabilisticPress
from tests.helpers import models_table
from tests.helpers.compare import assert_equals_oracle, compress, dense, greedy, press_of
from tests.helpers.models import ARCHITECTURES, REFUSED, UNREADABLE, tiny_llama, tokens

NO_STOP = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return ARCHITECTURES[request.param]


@pytest.fixture(params=["sdpa", "eager"])
def attn(request) -> str:
    return request.param


# A model whose layers all slide warns that nothing is compressed.
@pytest.mark.filterwarnings("ignore:every layer of")
def test_decoding_equals_the_oracle(architecture, attn):
    model = architecture.build(attn)
    ids, press = tokens(40), press_of(0.5)
    cache, full = compress(model, ids, press), dense(model, ids)
    assert press.report.layers == list(architecture.compressed)
    if architecture.compressed:
        assert abs(press.report.achieved_ratio - 0.5) < 0.05
    assert_equals_oracle(model, cache, full, [tokens(5, seed=1), tokens(1, seed=2), tokens(1, seed=3)])


@pytest.mark.filterwarnings("ignore:every layer of")
def test_generate_equals_the_greedy_loop(architecture, attn):
    model = architecture.build(attn)
    ids = tokens(40)
    with press_of(0.6)(model):
        generated = model.generate(ids, max_new_tokens=6, **NO_STOP)
        assert torch.equal(generated[:, 40:], greedy(model, DynamicCache(), ids, 6))


@pytest.mark.filterwarnings("ignore:every layer of")
def test_left_padded_rows_equal_rows_alone(architecture, attn):
    model = architecture.build(attn)
    batch, question, lengths = tokens(20, batch=2), tokens(3, batch=2, seed=1), (20, 12)
    mask = torch.stack([torch.arange(20) >= 20 - length for length in lengths]).long()
    longer = torch.nn.functional.pad(mask, (0, 3), value=1)
    positions = (longer.cumsum(-1) - 1).clamp(min=0)
    press = press_of(0.5)
    cache = compress(model, batch, press, attention_mask=mask, position_ids=positions[:, :20])
    assert press.report.context_lengths == list(lengths)
    together = model(question, past_key_values=cache, attention_mask=longer, position_ids=positions[:, 20:]).logits
    for row, length in enumerate(lengths):
        cache = compress(model, batch[row : row + 1, 20 - length :], press)
        alone = model(question[row : row + 1], past_key_values=cache).logits
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (3, 1), (8, 2), (8, 1), (16, 1), (1, 1)])
def test_query_heads_per_kv_head(attn, heads, kv_heads):
    model = tiny_llama(heads=heads, kv_heads=kv_heads, attn=attn)
    ids = tokens(50)
    assert_equals_oracle(model, compress(model, ids, press_of(0.6)), dense(model, ids), [tokens(4, seed=1), tokens(1)])


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
def test_widths_of_a_head(attn, head_dim):
    model = tiny_llama(head_dim=head_dim, attn=attn)
    ids = tokens(50)
    assert_equals_oracle(model, compress(model, ids, press_of(0.6)), dense(model, ids), [tokens(4, seed=1), tokens(1)])


def test_decoder_inside_a_multimodal_model(attn):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(
        text_config=ARCHITECTURES["Gemma 3"].build().config.to_dict(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attn).eval()
    ids, press = tokens(40), press_of(0.5)
    cache, full = compress(model, ids, press), dense(model, ids)
    assert press.report.layers == [1]
    assert_equals_oracle(model, cache, full, [tokens(5, seed=1), tokens(1)])

    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    compress(model, tokens(20, batch=2), press, attention_mask=mask)
    assert press.report.context_lengths == [20, 12]


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architectures_are_refused(name):
    architecture, error = REFUSED[name]
    model = architecture.build("eager")
    ids, cache = tokens(8), DynamicCache()
    with pytest.raises(TypeError, match=error), press_of()(model):
        model(ids, past_key_values=cache)


@pytest.mark.filterwarnings("ignore:every layer of")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scorers_of_kvpress_fail_for_the_families_that_the_page_says(name):
    model, fails = ARCHITECTURES[name].build("sdpa"), []
    for scorer in (
        kvpress.SnapKVPress(window_size=8),
        kvpress.TOVAPress(),
        kvpress.CompactorPress(),
        kvpress.ExpectedAttentionPress(),
        kvpress.LeverageScorePress(),
        kvpress.KeyDiffPress(),
        kvpress.KnormPress(),
        kvpress.LagKVPress(lag_size=16),
        kvpress.StreamingLLMPress(),
    ):
        try:
            compress(model, tokens(200), ProbabilisticPress(scorer, 0.5, seed=0))
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError):
            fails.append(type(scorer).__name__.removesuffix("Press"))
    assert tuple(fails) == UNREADABLE.get(name, ())


def test_page_of_models_is_current():
    assert models_table.PATH.read_text() == models_table.text(), "run `make models-table`"
