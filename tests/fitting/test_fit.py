"""Fitting: the surrogate is the closed form over all windows, whatever was interrupted or grouped."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvpress_prob import AttentionPress, MinVariancePress, ProbabilisticPress, Reconstruction, SurrogatePress
from kvpress_prob.fitting import fit as fitting
from kvpress_prob.fitting.checkpoint import load_progress
from kvpress_prob.fitting.fit import N_SINK, fit_surrogate
from kvpress_prob.fitting.targets import LEAST, read_window, targets_of
from kvpress_prob.fitting.windows import cut_windows
from kvpress_prob.maths.ridge import moments, solve_ridge
from kvpress_prob.sources import load_surrogate, save_surrogate
from tests.helpers.evaluation import character_tokenizer
from tests.helpers.models import ARCHITECTURES, build, tiny_gemma3, tiny_llama, tiny_mistral, tokens, words
from tests.helpers.models import tiny_tokenizer as tokenizer_of_words

SIZES = {"tokens": 12 * 48, "window": 48, "progress": False}


def texts(n=4):
    return [words(tokens(160, seed=seed)) for seed in range(n)]


def fit(model, **settings):
    return fit_surrogate(model, tokenizer_of_words(), texts(), **SIZES | settings)


def test_targets_are_the_presses_scores():
    model, ids = tiny_llama(), tokens(40)[0]
    targets = targets_of(read_window(model, ids))
    inputs = read_window(model, ids)
    lookup = AttentionPress(source=Reconstruction(), statistic="max").score_context(inputs.prefill)
    for row, index in enumerate(inputs.prefill.layers):
        expected = torch.cat((lookup[row][0], inputs.reading[index].float() * 40)).clamp(min=LEAST).log().mT
        assert torch.equal(targets[index], expected)
    assert isinstance(inputs.reading_press, MinVariancePress)


def test_the_surrogate_is_the_ridge_solution_over_all_windows():
    model = tiny_llama()
    surrogate = fit(model)
    windows = cut_windows(tokenizer_of_words(), texts(), tokens=12 * 48, window=48)
    read = [read_window(model, ids) for ids in windows.ids]
    for layer in (0, 1):
        x = torch.cat([inputs.hidden[layer][N_SINK:] for inputs in read])
        y = torch.cat([targets_of(inputs)[layer][N_SINK:] for inputs in read])
        expected = solve_ridge(moments(x, y), 1e-3)(x.double())
        predicted = torch.cat([surrogate.log_scores(layer, x.unsqueeze(0), it)[0] for it in surrogate.outputs])
        # Weights are stored in half precision.
        torch.testing.assert_close(predicted.mT.double(), expected, atol=2e-2, rtol=0)


def test_figures_are_of_windows_that_were_left_out():
    surrogate = fit(tiny_llama())
    held_out = surrogate.header.held_out
    assert held_out["windows"] == 2
    assert held_out["layers"] == [0, 1]
    for output in surrogate.outputs:
        assert all(-1 < it <= 1 for it in held_out["r_squared"][output])
        assert all(0 <= it["all"] <= 1 for it in held_out["recall"][output].values())
    assert held_out["recall"]["lookup"]["0.5"]["all"] > 0.55  # by chance 0.5


@pytest.mark.parametrize("kill", [1, 5, 11])
def test_a_killed_fit_goes_on_and_ends_with_the_same_surrogate(kill, tmp_path, monkeypatch):
    model = tiny_llama()
    expected = fit(model)
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", 0.0)
    read, real = [], fitting.targets_of

    def counted(inputs):
        read.append(None)
        if len(read) > kill:
            raise KeyboardInterrupt
        return real(inputs)

    monkeypatch.setattr(fitting, "targets_of", counted)
    checkpoint = tmp_path / "one.partial"
    with pytest.raises(KeyboardInterrupt):
        fit(model, checkpoint=checkpoint)
    assert checkpoint.is_file()
    read.clear()
    monkeypatch.setattr(fitting, "targets_of", lambda inputs: (read.append(None), real(inputs))[1])
    again = fit(model, checkpoint=checkpoint)
    assert len(read) == 12 - kill
    assert list(tmp_path.iterdir()) == [checkpoint]
    assert again.header == expected.header
    for name in ("scale", "weight", "bias"):
        torch.testing.assert_close(getattr(again, name), getattr(expected, name), rtol=1e-3, atol=1e-6)


def test_layers_in_groups_give_the_same_surrogate():
    model = tiny_llama(layers=3)
    whole, grouped = fit(model), fit(model, max_bytes=2 * 8 * 64**2)
    assert grouped.header.held_out == whole.header.held_out
    for name in ("scale", "weight", "bias"):
        assert torch.equal(getattr(grouped, name), getattr(whole, name))


def test_a_checkpoint_of_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", 0.0)
    checkpoint = tmp_path / "one.partial"
    state = fitting.Progress()
    fitting.save_progress(checkpoint, "another", state)
    with pytest.raises(ValueError, match=f"checkpoint must belong to this model, .* delete '{checkpoint}'"):
        fit(tiny_llama(), checkpoint=str(checkpoint))
    checkpoint.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="checkpoint must be a fit's progress"):
        fit(tiny_llama(), checkpoint=checkpoint)


@pytest.mark.parametrize("changed", [{"ridge": 0.1}, {"window": 96}, {"max_bytes": 10**6}])
def test_other_settings_do_not_continue_a_fit(changed, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", 0.0)
    checkpoint = tmp_path / "one.partial"
    fit(tiny_llama(), checkpoint=checkpoint)
    fit(tiny_llama(), checkpoint=checkpoint, ridge=np.float64(1e-3))
    with pytest.raises(ValueError, match="checkpoint must belong to this model, texts and settings"):
        fit(tiny_llama(), checkpoint=checkpoint, **changed)


def test_a_checkpoint_without_its_parts_is_named(tmp_path):
    checkpoint = tmp_path / "one.partial"
    torch.save({"key": "this", "progress": {"windows": 1}}, checkpoint)
    with pytest.raises(ValueError, match=r"checkpoint must be a fit's progress, .*one.partial': fields must be"):
        load_progress(checkpoint, "this")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"checkpoint": 3}, TypeError, "checkpoint must be a path or None, got int"),
        ({"checkpoint": "/"}, ValueError, "checkpoint must be a file in an existing folder, got '/'"),
        ({"checkpoint": "no/where"}, ValueError, "checkpoint must be a file in an existing folder, got 'no/where'"),
        ({"texts": "a text"}, TypeError, r"texts must be a sequence of texts, such as \[text\], got str"),
        ({"texts": 3}, TypeError, r"texts must be a sequence of texts, such as \[text\], got int"),
        ({"texts": ["a", None]}, TypeError, "texts must be a sequence of texts, got NoneType among them"),
    ],
)
def test_texts_and_checkpoints_of_other_types(settings, error, message):
    with pytest.raises(error, match=message):
        fit_surrogate(tiny_llama(), tokenizer_of_words(), **SIZES | settings)


@pytest.mark.parametrize(
    "model",
    [ARCHITECTURES["Qwen3"].build, tiny_gemma3, lambda: build("LlamaForCausalLM", hidden_size=48, head_dim=12)],
    ids=["Qwen3", "Gemma 3, sliding layers", "Llama of another width"],
)
def test_any_model_can_be_fitted_and_only_it_takes_its_surrogate(model, tmp_path):
    model = model()
    surrogate = fit(model, tokens=6 * 32, window=32)
    save_surrogate(surrogate, tmp_path / "one.safetensors")
    press = ProbabilisticPress(
        SurrogatePress(surrogate=str(tmp_path / "one.safetensors")), compression_ratio=0.5, seed=0
    )
    cache = DynamicCache()
    with press(model):
        model(tokens(60), past_key_values=cache)
    assert press.report is not None
    assert press.report.layers == surrogate.header.layers
    assert model(tokens(1), past_key_values=cache).logits.isfinite().all()
    with pytest.raises(ValueError, match="surrogate must be one of"):
        load_surrogate(tmp_path / "one.safetensors", model=tiny_llama())
    with pytest.raises(ValueError, match="surrogate must be one of"):
        replace(surrogate).check_model(build("Qwen3ForCausalLM", seed=3))


def test_default_texts_and_chat_templates():
    plain = cut_windows(character_tokenizer(), None, tokens=8 * 64, window=64)
    chat = cut_windows(character_tokenizer(chat=True), None, tokens=8 * 64, window=64)
    assert plain.ids.shape == chat.ids.shape == (8, 64)
    assert plain.digest != chat.digest
    bos = 1
    assert chat.ids[:, 0].eq(bos).tolist() == [True] * 4 + [False] * 4
    surrogate = fit_surrogate(tiny_llama(), character_tokenizer(), tokens=8 * 64, window=64, progress=False)
    assert surrogate.header.fitted_on["texts"] == "default texts, seed 0"
    assert surrogate.header.fitted_on["windows"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 48}, "tokens must be at least two windows of 48 tokens, got 48"),
        ({"tokens": 2000.0}, "tokens must be an integer >= 1, got 2000.0"),
        ({"tokens": None}, "tokens must be an integer >= 1, got None"),
        ({"window": 0}, "window must be an integer >= 5, got 0"),
        ({"window": N_SINK}, "window must be an integer >= 5, got 4"),
        ({"window": 2.5}, "window must be an integer >= 5, got 2.5"),
        ({"max_bytes": -5}, "max_bytes must be an integer >= 1, got -5"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"window": 170, "tokens": 10**6}, "texts must have at least two windows of 170 tokens, got 0"),
        *(({"ridge": it}, f"ridge must be a finite number > 0, got {it!r}") for it in (0.0, math.inf, "x", True)),
    ],
)
def test_bad_parameters(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(tiny_llama(), **settings)


def test_the_shortest_window():
    assert fit(tiny_llama(), window=N_SINK + 1, tokens=50).header.fitted_on["windows"] == 10


def test_a_model_without_full_attention_is_refused():
    with pytest.raises(ValueError, match="model must have full-attention layers, got MistralForCausalLM with none"):
        fit(tiny_mistral())
