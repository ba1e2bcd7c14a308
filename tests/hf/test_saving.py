"""Keeping a compressed cache in a file."""

import copy
import json
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache

from kvpress_prob import CacheBudget, MinVariancePress, ProbabilisticPress, load_compressed, save_compressed
from kvpress_prob.hf import read_header, saving
from tests.helpers.compare import compress, dense, greedy, press_of
from tests.helpers.models import ARCHITECTURES, build, tiny_gemma3, tiny_llama, tokens


@pytest.fixture
def path(tmp_path):
    return tmp_path / "context.safetensors"


@pytest.fixture
def saved(path):
    """A saved cache, its model and press."""
    model, press = tiny_llama(), press_of()
    cache = compress(model, tokens(60), press)
    save_compressed(cache, path, model=model, report=press.report)
    return cache, model, press


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "DeepSeek-V3", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_cache_decodes_to_the_bit(name, dtype, path):
    model, press = ARCHITECTURES[name].build(dtype=dtype), press_of(0.7)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :8] = 0
    cache = compress(model, tokens(30, batch=2), press, attention_mask=mask)
    save_compressed(cache, path, model=model, report=press.report)
    loaded = load_compressed(path, model=model)
    for step, length in enumerate((4, 1, 40)):
        mask = torch.nn.functional.pad(mask, (0, length), value=1)
        ids = tokens(length, batch=2, seed=step)
        want = model(ids, past_key_values=cache, attention_mask=mask).logits
        assert torch.equal(model(ids, past_key_values=loaded, attention_mask=mask).logits, want)


def test_what_was_appended_and_hidden_is_kept(path):
    model = tiny_llama()
    cache = compress(model, tokens(30), press_of())
    mask = torch.ones(1, 35, dtype=torch.long)
    mask[0, 30:32] = 0
    model(tokens(5), past_key_values=cache, attention_mask=mask)
    save_compressed(cache, path)
    loaded = load_compressed(path)
    assert [repr(layer) for layer in loaded.layers] == [repr(layer) for layer in cache.layers]
    loaded.crop(33)
    cache.crop(33)
    assert torch.equal(model(tokens(1), past_key_values=loaded).logits, model(tokens(1), past_key_values=cache).logits)


@pytest.mark.parametrize("own", [True, False], ids=["sliding layers", "plain layers"])
def test_sliding_layers_are_kept(own, path):
    model, cache = tiny_gemma3(), DynamicCache()
    with press_of()(model):
        cache = model(tokens(40), past_key_values=None if own else cache).past_key_values
    save_compressed(cache, path)
    loaded = load_compressed(path)
    for step in range(3):
        ids = tokens(9, seed=step)
        want = model(ids, past_key_values=cache).logits
        assert torch.equal(model(ids, past_key_values=loaded).logits, want)


def test_generate_and_growth_from_a_file(saved, path):
    cache, model, _ = saved
    ids = torch.cat([tokens(60), tokens(5, seed=1)], 1)
    got = model.generate(
        ids, past_key_values=load_compressed(path), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert torch.equal(got[:, 65:], greedy(model, cache, tokens(5, seed=1), 8))


def test_a_dense_cache_is_kept_too(path):
    """Ratio 0 leaves a cache dense."""
    model = tiny_llama()
    cache = compress(model, tokens(20), press_of(0.0))
    save_compressed(cache, path)
    loaded = load_compressed(path)
    assert torch.equal(model(tokens(3), past_key_values=loaded).logits, model(tokens(3), past_key_values=cache).logits)


def test_the_header(saved, path):
    _, model, press = saved
    header = read_header(path)
    assert header["format"] == saving.FORMAT
    assert header["logical_length"] == 60
    assert header["model"] == saving.fingerprint(model)
    assert header["report"] == {
        "settings": press.report.settings,
        "target_ratio": 0.5,
        "achieved_ratio": press.report.achieved_ratio,
        "seed": 0,
    }


def test_a_file_is_no_larger_than_what_is_kept(path):
    model = tiny_llama()
    press = press_of(0.75)
    save_compressed(compress(model, tokens(2048), press), path)
    kept = int(press.report.kept.sum())
    assert path.stat().st_size < kept * (2 * 16 * 4 + 4) + 4096


# -- Refusals ----------------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused_wherever_it_ends(saved, path):
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 40), 7, 8, 9, len(whole) - 1]:
        path.write_bytes(whole[:length])
        for read in (load_compressed, read_header):
            with pytest.raises(ValueError, match="must be a complete file of save_compressed"):
                read(path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code of a file was run",))


FOREIGN = {
    "pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "torch": lambda path: torch.save({"keys": Bomb()}, path),
    "json": lambda path: path.write_text("{}"),
    "weights": lambda path: save_file({"0.keys": torch.zeros(2)}, path),
    "not json": lambda path: save_file({"a": torch.zeros(2)}, path, {"kvpress_prob": "?"}),
    "no format": lambda path: save_file({"a": torch.zeros(2)}, path, {"kvpress_prob": "{}"}),
    "a list": lambda path: save_file({"a": torch.zeros(2)}, path, {"kvpress_prob": "[]"}),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused_and_runs_no_code(kind, path):
    FOREIGN[kind](path)
    with pytest.raises(ValueError, match="must be a complete file of save_compressed"):
        load_compressed(path)


def rewritten(path, **changes):
    """The same file with other entries in its header."""
    header, tensors = read_header(path), load_file(path)
    save_file(tensors, path, {"kvpress_prob": json.dumps(header | changes)})


def test_a_newer_format_is_refused(saved, path):
    rewritten(path, format=saving.FORMAT + 1)
    with pytest.raises(
        ValueError, match=rf"must have format {saving.FORMAT} or older, got {saving.FORMAT + 1}: update"
    ):
        load_compressed(path)


def test_a_header_that_does_not_fit_the_tensors_is_refused(saved, path):
    layers = read_header(path)["layers"]
    for change in ({"layers": layers * 2}, {"layers": [{}]}, {"layers": [layers[0] | {"batch": 3}]}):
        rewritten(path, **change)
        with pytest.raises(ValueError, match="must be a complete file of save_compressed"):
            load_compressed(path)
        rewritten(path, layers=layers)


@pytest.fixture
def everything(path):
    """A file with every kind of layer and field: padding, hidden tokens, a budget while decoding, sliding layers."""
    model = tiny_gemma3()
    press = press_of(0.5, budget=CacheBudget(24, interval=4, queries=3, start="decoding"))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :8] = 0
    with press(model):
        cache = model(tokens(30, batch=2), attention_mask=mask).past_key_values
    for step in range(3):
        mask = torch.nn.functional.pad(mask, (0, 2), value=1)
        model(tokens(2, batch=2, seed=step), past_key_values=cache, attention_mask=mask)
    save_compressed(cache, path, model=model, report=press.report)
    load_compressed(path)
    return read_header(path), load_file(path)


WRONG = [None, True, -1, -(2**70), 0.5, float("nan"), float("inf"), "1", "", [], [-1, 0], [10**6, 0], [0, 0, 0], {}]


def places(described, place=()):
    """Every field of a header, however deep."""
    for name, value in described.items() if isinstance(described, dict) else enumerate(described):
        yield (*place, name)
        if isinstance(value, dict | list):
            yield from places(value, (*place, name))


def changed(header, place, value):
    header = copy.deepcopy(header)
    inner = header
    for name in place[:-1]:
        inner = inner[name]
    if value is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return header


def test_every_field_of_a_header_is_checked(everything, path):
    """Scenario S61: no field may hold what it cannot be; the error names file and field, before a cache exists."""
    header, tensors = everything
    fine = 0
    for place in places(header):
        field = next(name for name in reversed(place) if isinstance(name, str))
        for value in [*WRONG, KeyError]:
            save_file(tensors, path, {"kvpress_prob": json.dumps(changed(header, place, value))})
            problem, loaded = None, None
            try:
                loaded = load_compressed(path)
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                assert str(path) in problem
                assert field == "layers" or field in problem or "logical_length" in problem or "layers" in problem
            else:
                fine += 1
                # Numbers that are possible, and a model or a report that is left out.
                assert field in ("model", "report", "settings", "target_ratio", "achieved_ratio", "seed", "uniform_mix",
                                 "temperature", "hides", "spent", "resampling", "rounds",
                                     "limit"), (place, value)  # fmt: skip
                assert loaded.get_seq_length() == header["logical_length"]
    assert fine < 60


BROKEN = {
    "values shorter than keys": ("values", lambda it: it[:-1], "values must be .* as the keys"),
    "values of another dtype": ("values", lambda it: it.half(), r"values must be .* of torch.float32 as the keys"),
    "flat keys": ("keys", lambda it: it.flatten(), "keys must be a tensor of . dimensions"),
    "whole numbers": ("keys", lambda it: it.long(), "keys must be floating numbers"),
    "no width": ("keys", lambda it: it[..., :0], "keys must be floating numbers"),
    "a NaN weight": ("log_w", lambda it: it.index_fill(0, torch.tensor([3]), torch.nan), "must be finite, got 'NaN'"),
    "an infinite weight": ("log_w", lambda it: it.index_fill(0, torch.tensor([3]), torch.inf), "log_w must be finite"),
    "a hidden context": ("log_w", lambda it: it.index_fill(0, torch.tensor([0]), -torch.inf), "log_w must be finite"),
    "too few weights": ("log_w", lambda it: it[1:], "log_w must be .* of torch.float32"),
    "double weights": ("log_w", lambda it: it.double(), "log_w must be .* of torch.float32"),
    "longer segments": ("length", lambda it: it + 1, r"(length must be in|keys must be \d+ entries)"),
    "an empty segment": ("length", lambda it: it * torch.tensor([0, *[1] * (len(it) - 1)]), "length must be in"),
    "a negative segment": ("length", lambda it: -it, "length must be in"),
    "other segments": ("length", lambda it: it.int(), "length must be int64"),
    "segments of half a row": ("length", lambda it: it[:-1], "length must be int64, a multiple of 2 rows"),
    "no segments": ("length", lambda it: it[:0], "length must be int64"),
    "queries of another batch": ("queries", lambda it: it[:1], "queries must be"),
    "too many queries": ("queries", lambda it: it.repeat(1, 1, 9, 1), "queries must be"),
    "queries of another width": ("queries", lambda it: it[..., 1:], "queries must be"),
    "fewer keys": ("keys", lambda it: it[1:], "(keys|values) must be"),
    "nothing": (None, None, "must be there"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("layer", ["compressed", "sliding"])
def test_every_tensor_of_a_file_is_checked(everything, path, kind, layer):
    """Scenario S61."""
    header, tensors = everything
    index = next(index for index, it in enumerate(header["layers"]) if it["kind"] == layer)
    which, change, message = BROKEN[kind]
    for name in [it for it in tensors if it.startswith(f"{index}.") and which in (None, it.split(".")[1])]:
        if which is None and name.endswith("queries"):
            continue  # without queries a budget begins anew
        wrong = {key: value for key, value in tensors.items() if key != name}
        if change is not None:
            wrong[name] = change(tensors[name]).contiguous()
        save_file(wrong, path, {"kvpress_prob": json.dumps(header)})
        with pytest.raises(ValueError, match=message) as error:
            load_compressed(path)
        assert str(path) in str(error.value)
        assert f"{index}." in str(error.value)


def test_tensors_of_no_layer_are_refused(everything, path):
    header, tensors = everything
    save_file({**tensors, "9.keys": torch.zeros(2)}, path, {"kvpress_prob": json.dumps(header)})
    with pytest.raises(ValueError, match=r"9.keys must be a tensor of one of the layers"):
        load_compressed(path)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o000])
def test_files_get_the_permissions_of_any_new_file(saved, path, mask):
    """Scenario S61: safetensors' own writer leaves files to their owner alone."""
    cache = saved[0]
    path.unlink()
    before = os.umask(mask)
    try:
        (path.parent / "any").touch()
        save_compressed(cache, path)
        save_compressed(cache, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode == (path.parent / "any").stat().st_mode
    assert sorted(it.name for it in path.parent.iterdir()) == ["any", path.name]


def test_another_models_cache_is_refused(saved, path):
    _, model, _ = saved
    load_compressed(path, model=model)
    wide = build("LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    for other in (tiny_llama(seed=1), tiny_llama(layers=3), wide, tiny_llama(dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="must be a cache of this model, got a cache of another model"):
            load_compressed(path, model=other)


def test_a_cache_saved_without_its_model_cannot_be_checked(path):
    save_compressed(compress(tiny_llama(), tokens(20), press_of()), path)
    with pytest.raises(ValueError, match="was saved without model="):
        load_compressed(path, model=tiny_llama())


def test_what_cannot_be_saved_is_refused(path):
    with pytest.raises(TypeError, match="past_key_values must be a DynamicCache"):
        save_compressed(StaticCache(tiny_llama().config, max_cache_len=8), path)
    with pytest.raises(ValueError, match="cache must hold a context, got an empty cache"):
        save_compressed(DynamicCache(), path)
    assert not path.exists()


def test_a_missing_file_and_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_compressed(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"path must be in an existing folder, got .*none"):
        save_compressed(dense(tiny_llama(), tokens(4)), tmp_path / "none" / "file")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["kvpress_prob.hf.saving.save_file", "os.fsync", "pathlib.Path.replace"])
def test_an_interrupted_save_leaves_the_old_file_whole(saved, path, monkeypatch, place, error):
    before = path.read_bytes()

    def interrupted(*args, **kwargs):
        if place.endswith("save_file"):
            args[1].write_bytes(b"half")
        raise error

    monkeypatch.setattr(place, interrupted)
    with pytest.raises(type(error)):
        save_compressed(compress(tiny_llama(), tokens(20), press_of()), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@torch.no_grad()
@pytest.mark.parametrize("start", ["prefill", "decoding"])
def test_numbers_of_numpy_are_saved(start, tmp_path):
    """Scenario S54."""
    model, cache = tiny_llama(), DynamicCache()
    budget = CacheBudget(np.int64(96), interval=np.int32(8), queries=8, start=start)
    press = ProbabilisticPress(MinVariancePress(), np.float32(0.5), n_sink=np.int64(3), budget=budget, seed=np.int64(2))
    with press(model):
        model(tokens(200), past_key_values=cache)
    save_compressed(cache, tmp_path / "cache.safetensors", report=press.report)
    loaded = load_compressed(tmp_path / "cache.safetensors")
    assert torch.equal(model(tokens(2), past_key_values=loaded).logits, model(tokens(2), past_key_values=cache).logits)


@torch.no_grad()
def test_a_row_that_was_cropped_to_its_padding(tmp_path):
    model, cache, mask = tiny_llama(), DynamicCache(), torch.ones(2, 40, dtype=torch.long)
    mask[0, :30] = 0
    with ProbabilisticPress(MinVariancePress(), budget=CacheBudget(80, interval=16, queries=2), seed=0)(model):
        model(tokens(40, batch=2), attention_mask=mask, past_key_values=cache)
    cache.crop(30)
    save_compressed(cache, tmp_path / "cache.safetensors")
    loaded = load_compressed(tmp_path / "cache.safetensors")
    assert [layer.store.length.tolist() for layer in loaded.layers] == [[0, 0, 30, 30]] * 2
