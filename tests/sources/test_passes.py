"""Sources that make a pass of their own: the rows that they read, and that nothing else notices."""

import threading
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from kvpress_prob import AttentionPress, ExpectedQueries, Lookahead, ProbabilisticPress, Reconstruction
from kvpress_prob.hf import batch_row, repeated, second_pass, watch_prefills
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.sources import PassSource
from tests.helpers.models import ARCHITECTURES, tiny_gemma3, tiny_llama, tokens

SOURCES = {
    "reconstruction": Reconstruction(),
    "chunked": Reconstruction(chunk_size=25),
    "scoped": Reconstruction(chunk_size=25, n_sink=4, skip=3),
    "lookahead": Lookahead(n_continuations=3, n_tokens=5),
}


class Finished:
    """A watcher that only keeps the finished prefill."""

    def layer(self, layer):
        pass

    def end(self, prefill):
        self.prefill = prefill


def prefill_of(model, ids, **kwargs):
    watcher = Finished()
    with watch_prefills(model, lambda: watcher):
        model(ids, past_key_values=DynamicCache(), **kwargs)
    return watcher.prefill


def rows_of(source, prefill):
    """Every block that the source shows, per layer."""
    seen = {}

    def visit(layer, rows):
        seen.setdefault(layer, []).append(rows)
        return rows.statistic_and_output("mean")[1]

    source.run(prefill, visit)
    return seen


def probabilities(rows, heads=4):
    """Attention [b hq n s] of a block in float64, spelt out."""
    keys = rows.keys.double().repeat_interleave(heads // rows.keys.shape[1], 1)
    n, s = rows.query.shape[2], keys.shape[2]
    logits = rows.query.double() @ keys.mT * rows.scaling
    logits = logits.masked_fill(torch.ones(n, s, dtype=torch.bool).triu(s - n + 1), -torch.inf)
    if rows.scope is not None:
        logits = logits.masked_fill(~rows.scope, -torch.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("name", SOURCES)
def test_a_pass_leaves_no_trace_in_the_cache(name):
    prefill = prefill_of(tiny_llama(), tokens(60))
    layers = [(layer.keys, layer.values) for layer in prefill.cache.layers]
    before = [(keys.clone(), values.clone(), keys.data_ptr()) for keys, values in layers]
    rows_of(SOURCES[name], prefill)
    for layer, (keys, values), (old_keys, old_values, place) in zip(prefill.cache.layers, layers, before, strict=True):
        assert layer.keys is keys
        assert layer.values is values
        assert keys.data_ptr() == place
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


def test_sliding_layers_keep_their_window_and_are_not_shown():
    prefill = prefill_of(tiny_gemma3(), tokens(60))
    before = [layer.keys.clone() for layer in prefill.cache.layers]
    assert list(rows_of(Reconstruction(chunk_size=30), prefill)) == prefill.layers == [5]
    for layer, keys in zip(prefill.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "SmolLM3", "Gemma 3", "Granite", "Command R7B"])
def test_the_pass_is_the_models_own_forward_pass(name, attn):
    """The decoder's output over the repeated context equals that of the plain model on a dense cache."""
    model = ARCHITECTURES[name].build(attn)
    ids = tokens(40)
    prefill = prefill_of(model, ids)
    outputs = []
    handle = model.model.register_forward_hook(lambda module, args, output: outputs.append(output.last_hidden_state))

    def attend(layer, inputs, keys, values):
        weights = torch.full((1, inputs.query.shape[2]), 0.1, dtype=torch.float64)
        return attention_mass(
            inputs.query, keys, weights, scaling=inputs.scaling, softcap=inputs.softcap, values=values
        )[1]

    second_pass(prefill, ids, attend)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    model(ids, past_key_values=cache)
    handle.remove()
    torch.testing.assert_close(outputs[0], outputs[2], atol=2e-5, rtol=2e-5)


def test_reconstruction_shows_the_whole_context_once_with_weights_that_sum_to_one():
    ids = tokens(60)
    prefill = prefill_of(tiny_llama(), ids)
    for source, blocks in ((Reconstruction(), [60]), (Reconstruction(chunk_size=25), [25, 25, 10])):
        for rows in rows_of(source, prefill).values():
            assert [block.query.shape[2] for block in rows] == blocks
            assert sum(float(block.weights.sum()) for block in rows) == pytest.approx(1)
            assert all(block.context == 60 for block in rows)
            assert all(block.keys.shape[2] == 60 + block.query.shape[2] for block in rows)


@pytest.mark.parametrize(("fraction", "fed"), [(0.5, 320), (0.25, 128), (0.01, 64), (1.0, 600)])
def test_a_fraction_repeats_whole_stretches_spread_over_the_context(fraction, fed):
    model, ids = tiny_llama(layers=1), tokens(600)
    (rows,) = rows_of(Reconstruction(fraction=fraction), prefill_of(model, ids)).values()
    assert abs(rows[0].query.shape[2] - fed) <= 64
    assert float(rows[0].weights.sum()) == pytest.approx(1)


def test_the_scope_of_kvzip_is_sinks_chunk_and_repeated_tokens():
    prefill = prefill_of(tiny_llama(), tokens(60))
    rows = rows_of(Reconstruction(chunk_size=25, n_sink=4, skip=10), prefill)[0]
    for block, start in zip(rows, (10, 35), strict=True):
        want = torch.zeros(60 + block.query.shape[2], dtype=torch.bool)
        want[:4] = True
        want[start : start + 25] = True
        want[60:] = True
        assert torch.equal(block.scope, want)


@pytest.mark.parametrize("statistic", ["mean", "max", "output_change"])
@pytest.mark.parametrize("factor", ["none", "norm", "centered"])
def test_scores_are_the_statistic_over_all_blocks(statistic, factor):
    if statistic == "output_change" and factor != "none":
        return
    prefill = prefill_of(tiny_llama(), tokens(60))
    source = Reconstruction(chunk_size=25)
    scores = AttentionPress(source=source, statistic=statistic, factor=factor).score_context(prefill)
    for layer, blocks in rows_of(source, prefill).items():
        values = prefill.cache.layers[layer].values.double()
        parts = []
        for block in blocks:
            p = probabilities(block)
            if statistic == "output_change":
                all_values = block.values.double().repeat_interleave(2, 1)
                change = (all_values.unsqueeze(2) - (p @ all_values).unsqueeze(3)).norm(dim=-1)
                p = p / (1 - p) * change
            parts.append(p[..., :60])
        p = torch.cat(parts, 2)  # [1 hq rows 60]
        mass = {
            "mean": p.mean(2),
            "max": p.amax(2),
            "output_change": p.mean(2),
        }[statistic].view(1, 2, 2, 60)
        if factor == "norm":
            mass = mass * values.norm(dim=-1).unsqueeze(2)
        elif factor == "centered":
            output = mass / mass.sum(-1, keepdim=True) @ values
            mass = mass * (values.unsqueeze(2) - output.unsqueeze(3)).norm(dim=-1)
        want = {"max": mass.amax(2)}.get(statistic, mass.mean(2))
        torch.testing.assert_close(scores[layer].double(), want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", SOURCES)
def test_a_padded_batch_is_scored_as_its_rows_alone(name):
    model, ids = tiny_llama(), tokens(50, batch=2)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, :12] = 0
    press = AttentionPress(source=SOURCES[name], statistic="max")
    together = press.score_context(prefill_of(model, ids, attention_mask=mask))
    for row, padding in enumerate((12, 0)):
        alone = press.score_context(prefill_of(model, ids[row : row + 1, padding:]))
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[row, :, padding:], b[0], atol=1e-5, rtol=1e-4)
            assert (a[row, :, :padding] == 0).all()


def test_a_batch_row_of_a_sliding_model_is_the_row_alone():
    model, ids = tiny_gemma3(), tokens(50, batch=2)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, :40] = 0
    single = batch_row(prefill_of(model, ids, attention_mask=mask), 0)
    alone = prefill_of(model, ids[:1, 40:])
    assert torch.equal(single.input_ids, ids[:1, 40:])
    for a, b in zip(single.cache.layers, alone.cache.layers, strict=True):
        torch.testing.assert_close(a.values, b.values, atol=1e-5, rtol=1e-4)  # keys are rotated by the padding too
        assert a.keys.shape == b.keys.shape
        assert a.get_seq_length() == b.get_seq_length() == 10


def test_lookahead_samples_from_the_model_and_is_seeded():
    prefill = prefill_of(tiny_llama(), tokens(60))
    source = Lookahead(n_continuations=400, n_tokens=1, seed=5)
    drawn, total, _ = source._sample(repeated(prefill, 400))
    probability = prefill.model.lm_head(prefill.last_hidden_state).double().softmax(-1).squeeze(0)
    counts = torch.bincount(drawn.flatten(), minlength=len(probability))
    likely = probability > 5 / 400
    z = (counts - 400 * probability) / (400 * probability * (1 - probability)).sqrt()
    assert z[likely].abs().max() < 4.5
    torch.testing.assert_close(total.double(), probability[drawn.squeeze(-1)].log(), atol=1e-4, rtol=1e-4)
    again, _, _ = source._sample(repeated(prefill, 400))
    other, _, _ = replace(source, seed=6)._sample(repeated(prefill, 400))
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)


def test_lookahead_continues_the_context():
    """The rows are those of context plus continuation, and likelier continuations weigh more on request."""
    model = tiny_llama()
    ids = tokens(30)
    prefill = prefill_of(model, ids)
    source = Lookahead(n_continuations=3, n_tokens=6, by_likelihood=True)
    futures, log_likelihood, _ = source._sample(repeated(prefill, 3))
    (block,) = rows_of(source, prefill)[1]
    cache = DynamicCache()
    model(torch.cat((ids.expand(3, -1), futures), 1), past_key_values=cache)
    torch.testing.assert_close(block.keys, cache.layers[1].keys, atol=1e-5, rtol=1e-4)
    want = torch.softmax(log_likelihood.double() / 6, 0)
    torch.testing.assert_close(block.weights.sum(-1), want)


def test_the_global_random_state_is_left_alone():
    prefill = prefill_of(tiny_llama(), tokens(30))
    state = torch.get_rng_state()
    rows_of(Lookahead(), prefill)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_thread_prefills_as_ever_during_a_pass():
    """While one thread repeats its context, a second thread's prefill on the same model is scored and compressed."""
    model, ids = tiny_llama(), tokens(40)
    press = ProbabilisticPress(AttentionPress(source=Reconstruction(), statistic="max"), 0.5, seed=0)
    alone = DynamicCache()
    with press(model):
        model(ids, past_key_values=alone)
    started, done = threading.Event(), threading.Event()
    caches = {}

    class Waiting:
        """Repeats once another thread has had its whole turn inside this pass."""

        def run(self, prefill, visit):
            if not started.is_set():
                started.set()

                def slow(layer, rows):
                    done.wait(timeout=30)
                    return visit(layer, rows)

                Reconstruction().run(prefill, slow)
            else:
                Reconstruction().run(prefill, visit)

    waiting = ProbabilisticPress(AttentionPress(source=Waiting(), statistic="max"), 0.5, seed=0)

    def prefill(name):
        with torch.no_grad():
            caches[name] = DynamicCache()
            model(ids, past_key_values=caches[name])

    with waiting(model):
        first = threading.Thread(target=prefill, args=("first",))
        first.start()
        assert started.wait(timeout=30)
        prefill("second")
        done.set()
        first.join()
    for cache in caches.values():
        for ours, want in zip(cache.layers, alone.layers, strict=True):
            assert torch.equal(ours.store.keys[ours.store.start[0]], want.store.keys[want.store.start[0]])
            assert torch.equal(ours.store.length, want.store.length)


def test_an_error_in_a_pass_leaves_model_and_cache_as_they_were():
    model, ids = tiny_llama(), tokens(40)
    plain = model(ids).logits

    class Broken:
        def run(self, prefill, visit):
            def broken(layer, rows):
                raise RuntimeError("injected")

            Reconstruction().run(prefill, broken)

    cache = DynamicCache()
    with pytest.raises(RuntimeError, match="injected"), ProbabilisticPress(AttentionPress(source=Broken()), 0.5)(model):
        model(ids, past_key_values=cache)
    assert cache.layers[0].keys.shape[2] == 40
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, plain)


def test_embeddings_cannot_be_repeated():
    model = tiny_llama()
    embeds = model.get_input_embeddings()(tokens(30))
    with (
        pytest.raises(ValueError, match="input_ids must be given to the model for a reconstruction"),
        ProbabilisticPress(AttentionPress(source=Reconstruction()), 0.5)(model),
    ):
        model(inputs_embeds=embeds, past_key_values=DynamicCache())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Reconstruction(chunk_size=0), "chunk_size must be an integer >= 1, got 0"),
        (lambda: Reconstruction(fraction=0), r"fraction must be a number in \(0, 1\], got 0"),
        (lambda: Reconstruction(fraction=1.5), r"fraction must be a number in \(0, 1\], got 1.5"),
        (lambda: Reconstruction(skip=-1), "skip must be an integer >= 0, got -1"),
        (lambda: Reconstruction(n_sink=-1), "n_sink must be an integer >= 0, got -1"),
        (lambda: Lookahead(n_continuations=0), "n_continuations must be an integer >= 1, got 0"),
        (lambda: Lookahead(n_tokens=1.5), "n_tokens must be an integer >= 1, got 1.5"),
        (lambda: Lookahead(temperature=0), "temperature must be a number > 0, got 0"),
        (lambda: ExpectedQueries(n_future_positions=0), "n_future_positions must be an integer >= 1, got 0"),
        (lambda: ExpectedQueries(n_sink=-1), "n_sink must be an integer >= 0, got -1"),
        (lambda: ExpectedQueries(max_rows=0), "max_rows must be an integer >= 1, got 0"),
    ],
)
def test_bad_parameters(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_what_is_a_pass():
    assert isinstance(Reconstruction(), PassSource)
    assert isinstance(Lookahead(), PassSource)


@pytest.mark.parametrize("eos", [None, "some", "all"])
def test_a_continuation_ends_with_the_sequence(eos):
    """Rows from the end-of-sequence token on do not count, a first token always does; every continuation counts
    alike."""
    model, ids = tiny_llama(), tokens(60)
    model.generation_config.eos_token_id = None
    source = Lookahead(n_continuations=4, n_tokens=6, by_likelihood=False, seed=3)
    prefill = prefill_of(model, ids)
    free = rows_of(source, prefill)[0][0]
    drawn = source._sample(repeated(prefill, 4))[0]
    stops = {None: None, "some": [int(drawn[0, 2]), int(drawn[1, 0])], "all": list(range(128))}[eos]
    model.generation_config.eos_token_id = stops
    (block,) = rows_of(source, prefill)[0]
    assert float(block.weights.sum()) == pytest.approx(1)
    torch.testing.assert_close(block.weights.sum(-1), torch.full((4,), 0.25, dtype=torch.float64))
    if eos is None:
        assert torch.equal(block.weights, free.weights)
    elif eos == "all":
        assert block.weights.shape == (4, 1)
    else:
        for row, continuation in zip(block.weights, drawn.tolist(), strict=True):
            ends = [place for place, token in enumerate(continuation) if token in stops]
            length = max(min(ends, default=6), 1)
            want = torch.zeros(len(row), dtype=torch.float64)
            want[:length] = 0.25 / length
            torch.testing.assert_close(row, want)
        assert float(block.weights[0, 2]) == 0


def test_likelihood_is_that_of_the_tokens_that_count():
    model = tiny_llama()
    prefill = prefill_of(model, tokens(60))
    source = Lookahead(n_continuations=3, n_tokens=5, by_likelihood=True)
    drawn, total, _ = source._sample(repeated(prefill, 3))
    model.generation_config.eos_token_id = int(drawn[0, 2])
    _, shorter, counts = source._sample(repeated(prefill, 3))
    assert int(counts[0].sum()) == 2
    log_p = torch.log_softmax(model(torch.cat([tokens(60).expand(3, -1), drawn], 1)).logits.float(), -1)[:, 59:-1]
    each = log_p.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(total, each.sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shorter[0], each[0, :2].sum(), atol=1e-4, rtol=1e-4)
