"""Surrogates: what they compute, what they refuse, and their files."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvpress_prob.sources import Surrogate, find_surrogate, load_surrogate, save_surrogate, surrogate_path
from tests.helpers.models import ARCHITECTURES, build, tiny_gemma3, tiny_llama
from tests.helpers.surrogates import random_surrogate

KEY = "kvpress_prob_surrogate"


@pytest.fixture
def surrogate():
    return random_surrogate(tiny_llama())


@pytest.fixture
def file(surrogate, tmp_path):
    save_surrogate(surrogate, tmp_path / "one.safetensors")
    return tmp_path / "one.safetensors"


def rewritten(file, change_header=lambda header: header, change_tensors=lambda tensors: tensors):
    """The file again with another header or other tensors."""
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()[KEY])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(change_tensors(tensors), file, {KEY: json.dumps(change_header(header))})


@pytest.mark.parametrize("output", ["lookup", "reading"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_the_formula(surrogate, output, dtype):
    hidden = torch.randn(2, 9, 64).to(dtype)
    scores = surrogate.log_scores(1, hidden, output)
    place = surrogate.outputs.index(output)
    x = hidden.double() / surrogate.scale[1].double()
    expected = torch.einsum("bnc,ch->bhn", x, surrogate.weight[1, place].double())
    expected = expected + surrogate.bias[1, place].double().unsqueeze(-1)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)


def test_unknown_layers_outputs_and_widths_are_refused(surrogate):
    hidden = torch.randn(1, 3, 64)
    with pytest.raises(ValueError, match=r"layer must be one of the surrogate's \[0, 1\], got 7"):
        surrogate.log_scores(7, hidden, "lookup")
    with pytest.raises(ValueError, match=r"output must be one of \['lookup', 'reading'\], got 'other'"):
        surrogate.log_scores(0, hidden, "other")
    with pytest.raises(ValueError, match="hidden_states must have width 64, got 32"):
        surrogate.log_scores(0, hidden[..., :32], "lookup")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", torch.ones(2, 32), r"scale must be torch.float32 of shape \(2, 64\)"),
        ("scale", torch.zeros(2, 64), "scale must be positive"),
        ("weight", torch.ones(2, 2, 64, 2), r"weight must be torch.float16"),
        ("bias", torch.full((2, 2, 2), torch.nan), "bias must be finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(surrogate, name, value, message):
    with pytest.raises(ValueError, match=message):
        replace(surrogate, **{name: value})


def test_a_file_gives_back_what_was_saved(surrogate, file, tmp_path):
    loaded = load_surrogate(file, model=tiny_llama())
    assert loaded.header == surrogate.header
    for name in ("scale", "weight", "bias"):
        assert torch.equal(getattr(loaded, name), getattr(surrogate, name))
    assert repr(loaded) == repr(surrogate)
    assert repr(random_surrogate(tiny_llama(), seed=1)) != repr(surrogate)
    assert [it.name for it in tmp_path.iterdir()] == ["one.safetensors"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny_llama(seed=1), "this model's weights, got one of other weights"),
        (lambda: build("LlamaForCausalLM", hidden_size=32), "this model's weights, got one of other weights"),
        (lambda: ARCHITECTURES["Qwen3"].build(), "must be one of Qwen3ForCausalLM, got one of LlamaForCausalLM"),
        (tiny_gemma3, "must be one of Gemma3ForCausalLM, got one of LlamaForCausalLM"),
    ],
)
def test_another_models_surrogate_is_refused(file, model, message):
    with pytest.raises(ValueError, match=f"one.safetensors.*{message}"):
        load_surrogate(file, model=model())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 2, "format must be 1, got 2"),
        ("format", None, "format must be 1, got None"),
        ("format", True, "format must be 1, got True"),
        ("architecture", "", "architecture must be a name"),
        ("fingerprint", "abc", "fingerprint must be a digest"),
        ("fingerprint", "x" * 64, "fingerprint must be a digest"),
        ("hidden_size", True, "hidden_size must be an integer >= 1, got True"),
        ("hidden_size", 0, "hidden_size must be an integer >= 1, got 0"),
        ("kv_heads", "2", "kv_heads must be an integer >= 1, got '2'"),
        ("layers", [1, 0], "layers must be increasing layer indices"),
        ("layers", [0, True], r"layers must be increasing layer indices, got \[0, True\]"),
        ("layers", [0], r"scale must be torch.float32 of shape \(1, 64\)"),
        ("predicts", {}, "predicts must be the outputs .'lookup', 'reading'. and their meaning"),
        (
            "predicts",
            {"lookup": "a", "other": "b"},
            "predicts must be the outputs .* 'other': 'b'}",
        ),
        ("predicts", {"lookup": "a", "reading": 3}, "predicts must be the outputs"),
        ("transformers", "new", "transformers must be a version"),
        ("fitted_on", [], "fitted_on must be a mapping"),
        ("held_out", None, "held_out must be a mapping"),
    ],
)
def test_a_wrong_header_is_one_error_that_names_file_and_field(file, field, value, message):
    rewritten(file, lambda header: {**header, field: value})
    with pytest.raises(ValueError, match=f"one.safetensors.*{message}"):
        load_surrogate(file)


def test_layers_are_the_models(file):
    rewritten(file, lambda header: {**header, "layers": [0, 7]})
    with pytest.raises(ValueError, match=r"one.safetensors.*full-attention layers \[0, 1\], got \[0, 7\]"):
        load_surrogate(file, model=tiny_llama())


def test_missing_parts_are_named(file):
    rewritten(file, lambda header: {name: value for name, value in header.items() if name != "layers"})
    with pytest.raises(ValueError, match=r"one.safetensors.*layers must be increasing layer indices, got None"):
        load_surrogate(file)


def test_a_missing_tensor_is_named(file):
    rewritten(file, change_tensors=lambda tensors: {"scale": tensors["scale"]})
    with pytest.raises(ValueError, match=r"one.safetensors.*weight must be there, got \['scale'\]"):
        load_surrogate(file)


def test_foreign_and_damaged_files_are_refused(file, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(1)}, other)
    with pytest.raises(ValueError, match=r"other.safetensors.*metadata must be a surrogate's"):
        load_surrogate(other)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"damaged.safetensors"):
        load_surrogate(damaged)
    with pytest.raises(ValueError, match=f"'{tmp_path}' must be a surrogate .* path must be a file, got a folder"):
        load_surrogate(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_surrogate(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="path must be in an existing folder"):
        save_surrogate(load_surrogate(file), tmp_path / "nowhere" / "one.safetensors")


def test_a_model_finds_its_own_in_the_cache_folder(surrogate, tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"surrogate of LlamaForCausalLM .* kvpress-prob fit --model MODEL"):
        find_surrogate(model)
    path = surrogate_path(model)
    path.parent.mkdir(parents=True)
    save_surrogate(surrogate, path)
    found = find_surrogate(model)
    assert isinstance(found, Surrogate)
    assert found.header == surrogate.header
    with pytest.raises(ValueError, match="must have been fitted before"):
        find_surrogate(tiny_llama(seed=5))
