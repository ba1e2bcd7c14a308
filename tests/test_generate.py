"""transformers' ``generate`` and kvpress' pipeline over compressed caches."""

import copy

import pytest
import torch
from kvpress import KVPressTextGenerationPipeline
from transformers import DynamicCache, StaticCache

from tests.helpers.compare import compress, dense, greedy, press_of
from tests.helpers.models import ARCHITECTURES, tiny_llama, tiny_tokenizer, tokens, words
from tests.helpers.oracle import biases_of, oracle_attention

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 8}


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    return tiny_llama(attn=request.param)


def context_and_question(length=60):
    ids = tokens(length)
    return ids, tokens(5, seed=1)


# -- Continuing from a compressed cache --------------------------------------------------------------------------------


def test_full_ids_equal_the_greedy_loop(model):
    """Scenario S17 a."""
    ids, question = context_and_question()
    cache = compress(model, ids, press_of())
    want = greedy(model, copy.deepcopy(cache), question, 8)
    got = model.generate(torch.cat([ids, question], 1), past_key_values=cache, **GREEDY)
    assert torch.equal(got[:, 65:], want)
    assert cache.get_seq_length() == 60 + 5 + 7


@pytest.mark.parametrize("mask", [None, torch.ones(1, 65, dtype=torch.long)], ids=["no mask", "mask"])
def test_the_question_alone_raises_as_over_a_dense_cache(model, mask):
    """Scenario S17 b: transformers takes ids to be the whole text, and finds nothing new in them."""
    ids, question = context_and_question()
    for cache in (compress(model, ids, press_of()), dense(model, ids)):
        with pytest.raises(IndexError):
            model.generate(question, attention_mask=mask, past_key_values=cache, **GREEDY)


def test_a_second_turn(model):
    ids, question = context_and_question()
    cache = compress(model, ids, press_of())
    same = copy.deepcopy(cache)
    first = model.generate(torch.cat([ids, question], 1), past_key_values=cache, **GREEDY)
    more = torch.cat([first, tokens(4, seed=7)], 1)
    second = model.generate(more, past_key_values=cache, **GREEDY)
    answer = greedy(model, same, question, 8)
    want = greedy(model, same, torch.cat([answer[:, -1:], tokens(4, seed=7)], 1), 8)
    assert torch.equal(second[:, more.shape[1] :], want)


def test_sampling_is_reproducible_and_may_return_several_sequences(model):
    """Scenario S20."""
    ids, press = tokens(60), press_of()
    settings = GREEDY | {"do_sample": True, "num_return_sequences": 2}
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        with press(model):
            results.append(model.generate(ids, **settings))
    assert torch.equal(*results)
    assert press.report.context_lengths == [60, 60]
    assert torch.equal(press.report.kept[:, 0], press.report.kept[:, 1])


@pytest.mark.parametrize("beams", [3, 4])
def test_beam_search_equals_the_oracle(model, beams):
    """Scenario S20: beams reorder the cache at every step."""
    ids, question = context_and_question()
    cache, full = compress(model, ids, press_of(0.7)), dense(model, ids)
    biases = biases_of(cache, full)
    cache.batch_repeat_interleave(beams)
    full.batch_repeat_interleave(beams)
    text = torch.cat([ids, question], 1)
    settings = GREEDY | {"num_beams": beams, "num_return_sequences": beams, "return_dict_in_generate": True}
    got = model.generate(text, past_key_values=cache, **settings)
    assert any(len(set(indices.tolist())) > 1 for indices in got.beam_indices), "no beam was reordered"
    with oracle_attention(model, {index: bias.expand(beams, -1, -1) for index, bias in biases.items()}):
        want = model.generate(text, past_key_values=full, **settings)
    assert torch.equal(got.sequences, want.sequences)


def test_beam_search_inside_the_block(model):
    press = press_of()
    with press(model):
        inside = model.generate(tokens(60), num_beams=3, **GREEDY)
    assert press.report.context_lengths == [60, 60, 60]
    with press_of()(model):
        again = model.generate(tokens(60).expand(3, -1), num_beams=3, **GREEDY)
    assert torch.equal(again, inside.expand(3, -1))


def test_prompt_lookup_over_a_compressed_cache(model):
    """Scenario S20: rejected candidates are cropped."""
    ids = tokens(12).repeat(1, 5)
    cache = compress(model, ids, press_of())
    want = greedy(model, copy.deepcopy(cache), tokens(5), 8)
    settings = {**GREEDY, "eos_token_id": 2}
    model.generation_config.eos_token_id = 2
    text = torch.cat([ids, tokens(5)], 1)
    got = model.generate(text, past_key_values=cache, prompt_lookup_num_tokens=3, **settings)[0, 65:].tolist()
    assert got == want[0, : len(got)].tolist()
    assert len(got) == 8 or got[-1] == 2


def test_assisted_generation_over_a_compressed_cache(model):
    ids, question = context_and_question()
    cache = compress(model, ids, press_of())
    want = greedy(model, copy.deepcopy(cache), question, 8)
    text = torch.cat([ids, question], 1)
    got = model.generate(text, past_key_values=cache, assistant_model=tiny_llama(seed=3, layers=1), **GREEDY)
    assert torch.equal(got[:, 65:], want)


def test_assisted_generation_whose_candidates_are_part_of_the_prefill_raises(model):
    """The first pass would hold context and candidates, of which rejected ones must be cropped."""
    with pytest.raises(NotImplementedError, match="cannot crop into a compressed context"), press_of()(model):
        model.generate(tokens(60), assistant_model=tiny_llama(seed=3, layers=1), **GREEDY)


def test_a_left_padded_batch(model):
    """Scenario S18."""
    ids = tokens(20, batch=2)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    press = press_of()
    with press(model):
        together = model.generate(ids, attention_mask=mask, **GREEDY)
    assert press.report.context_lengths == [20, 12]
    for row, length in ((0, 20), (1, 12)):
        with press_of()(model):
            alone = model.generate(ids[row : row + 1, 20 - length :], **GREEDY)
        assert torch.equal(together[row, 20:], alone[0, length:])


def test_extra_left_padding_changes_nothing(model):
    padded = torch.nn.functional.pad(tokens(20), (12, 0))
    with press_of()(model):
        want = model.generate(tokens(20), **GREEDY)
        got = model.generate(padded, attention_mask=(padded != 0).long(), **GREEDY)
    assert torch.equal(got[:, 32:], want[:, 20:])


def test_copies_of_one_context_serve_several_prompts(model):
    ids, context = tokens(60), compress(model, tokens(60), press_of())
    for seed in (1, 2, 1):
        question = tokens(5, seed=seed)
        got = model.generate(torch.cat([ids, question], 1), past_key_values=copy.deepcopy(context), **GREEDY)
        assert torch.equal(got[:, 65:], greedy(model, compress(model, ids, press_of()), question, 8))
    assert context.get_seq_length() == 60


def test_embeddings(model):
    """Scenario S33."""
    ids = tokens(60)
    with press_of()(model):
        got = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY)
        want = model.generate(ids, **GREEDY)
    assert torch.equal(got, want[:, 60:])


def test_a_chunked_prefill_compresses_its_first_chunk_only(model):
    """Documented: a prefill is one pass on an empty cache."""
    press = press_of()
    with press(model), pytest.warns(UserWarning, match="28 tokens that follow 32 in a cache are kept whole"):
        model.generate(tokens(60), prefill_chunk_size=32, **GREEDY)
    assert press.report.context_lengths == [32]


def test_quantized_and_static_caches_are_refused(model):
    """Scenario S21."""
    for implementation in ("static", "offloaded"):
        with pytest.raises(TypeError, match="past_key_values must be a DynamicCache"), press_of()(model):
            model.generate(tokens(20), cache_implementation=implementation, **GREEDY)


# -- kvpress' pipeline -------------------------------------------------------------------------------------------------


def pipeline_of(model):
    model.generation_config.eos_token_id = 2
    return KVPressTextGenerationPipeline(model=model, tokenizer=tiny_tokenizer())


def answer_of(model, context, question, press, steps):
    """What the pipeline must answer: a plain greedy loop over a cache of this question's own."""
    ids = torch.cat([torch.tensor([[1]]), context], 1)
    chosen = greedy(model, compress(model, ids, press), question, steps)[0].tolist()
    if 2 in chosen:
        chosen = chosen[: chosen.index(2)]
    return " ".join(f"w{index}" for index in chosen if index > 2)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi-3", "Gemma 3"])
def test_pipeline_with_several_questions(name, attn):
    """Scenario S15: every answer starts from the same compressed context."""
    model, press = ARCHITECTURES[name].build(attn), press_of(0.6)
    pipe, context = pipeline_of(model), tokens(60)
    questions = [tokens(5, seed=1), tokens(9, seed=2), tokens(5, seed=1)]
    cache = DynamicCache()
    answers = pipe(
        words(context), questions=[words(ids) for ids in questions], press=press, cache=cache, max_new_tokens=6
    )["answers"]
    assert answers[0] == answers[2]
    assert answers == [answer_of(model, context, ids, press_of(0.6), 6) for ids in questions]
    assert press.report.layers == list(ARCHITECTURES[name].compressed)
    for index, kept in zip(press.report.layers, press.report.kept, strict=True):
        assert cache.layers[index].get_seq_length() == 61
        assert torch.equal(cache.layers[index].store.length, kept.flatten())


def test_pipeline_with_one_question_and_a_re_used_press():
    """Scenario S13 through the pipeline."""
    model, press = tiny_llama(), press_of(0.5)
    pipe = pipeline_of(model)
    for seed in (0, 1, 0):
        context, question = tokens(60, seed=seed), tokens(4, seed=9)
        answer = pipe(words(context), question=words(question), press=press, max_new_tokens=6)["answer"]
        assert answer == answer_of(model, context, question, press_of(0.5), 6)
        assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.02)


def test_pipeline_refuses_a_static_cache():
    model = tiny_llama()
    with pytest.raises(TypeError, match="past_key_values must be a DynamicCache"):
        pipeline_of(model)(words(tokens(20)), press=press_of(), cache=StaticCache(model.config, max_cache_len=64))
