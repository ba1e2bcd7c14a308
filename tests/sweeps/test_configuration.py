"""Every value of a configuration has its range, and can become what it is for."""

import math
from dataclasses import fields

import pytest

from kvpress_prob.examples.tasks import TASKS
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.prefills.press_spec import PressSpec
from kvpress_prob.records.writer import results_folder
from kvpress_prob.sweeps.configuration import SweepConfig

GOOD = {"name": "x", "model": "m", "presses": ["no_press", "snapkv"], "ratios": [0.5]}
COUNTS = ("length", "examples_per_task", "max_context_tokens", "max_new_tokens", "batch_rows")
TEXTS = ("", " ", "a\nb", "a\x00b", "\u2028", "a\x1b[31m", 3, None, ["x"])
BAD = {
    "name": ("", ".", "..", "../up", "a/b", "a\\b", "/root", "-x", ".hidden", "a b", "a\n", "a\x00", "é", "x" * 81, 3,
             None),
    "model": TEXTS,
    "data": TEXTS,
    "presses": ([], "snapkv", None, ["snapkv", "snapkv"], [""], ["snap"], [3], [PressSpec("snapkv", label="a\nb")],
                [PressSpec("snapkv", label=" ")], [PressSpec("snapkv", label="no_press")],
                [PressSpec("no_press", label="dense")], [PressSpec("snapkv", {"window_size": -1})],
                [PressSpec("snapkv", {3: 5})], [PressSpec("prob_best", {None: 5})],
                [PressSpec("snapkv", {"window_size": "many"})], [PressSpec("snapkv", {"window_size": 2.5})],
                [PressSpec("adakv_snapkv", {"press": "snapkv"})],
                [PressSpec("adakv_snapkv", {"alpha_safeguard": True})],
                [PressSpec("adakv_snapkv", {"alpha_safeguard": math.nan})], [PressSpec("prob_min", {"sampler": 3})],
                [PressSpec("tova"), PressSpec("snapkv", label="tova")]),
    "ratios": ([], 0.5, None, ["0.5"], [1.0], [1], [-0.1], [math.nan], [math.inf], [True], [None], [0.5, 0.5],
               [0, 0.0], [10**400]),
    "entries": ([], 64, [0], [-3], [2.5], ["8"], [True], [64, 64], [4096]),
    "seeds": ([], 0, None, ["0"], [0, 0], [1, 2, 1], [-1], [2**63], [0.0], [True], [None]),
    "benchmark": ("loogle", "", None, 3, "RULER"),
    "tasks": ([], "vt", ["niah"], ["vt", "vt"], [None], ["qasper"]),
    "query_aware": (1, "true", None),
    "attention_error": (0, "no", None),
    "decode": ("greedy", "", None, True),
    "dtype": ("float64", "", None),
    "attn_implementation": ("flash_attention_2", "", None),
    "device": ("gpu", "", "cuda:x", "cuda:-1", "meta", "cpu0", 0, "0", "../cpu"),
    "data_seed": (-1, 0.5, True, None, "0", 2**63),
    **{name: (0, -3, 2.5, "8", True, [8], 10**400) for name in COUNTS},
}  # fmt: skip


def test_every_field_is_covered():
    assert set(BAD) == {field.name for field in fields(SweepConfig)}
    for name in ("length", "batch_rows"):
        with pytest.raises(ValueError, match=f"{name} must be an integer, got None"):
            SweepConfig(**GOOD | {name: None})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=repr
)
def test_bad_values_are_refused_by_name(name, value):
    """Scenario S58."""
    words = {"presses": "press|options|label", "tasks": "tasks", "data_seed": "data_seed"}.get(name, name)
    with pytest.raises(ValueError, match=words):
        SweepConfig(**GOOD | ({"ratios": []} if name == "entries" else {}) | {name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Smollm2_ruler-0.5+x=1"}, {"name": "7"}, {"ratios": [0, 0.999]}, {"ratios": [0.1, 0.2, 0.30001]},
        {"seeds": [0, 2**63 - 1]}, {"tasks": list(TASKS["ruler"])}, {"benchmark": "longbench", "tasks": ["2wikimqa"]},
        {"device": "cpu"}, {"device": "cuda:1"}, {"max_new_tokens": 1}, {"batch_rows": 1}, {"data_seed": 7},
        {"presses": [PressSpec("snapkv", label='"><script>alert(1)</script>'), "prob_best"]},
    ],
    ids=str,
)  # fmt: skip
def test_good_values_are_taken(change):
    config = SweepConfig(**GOOD | change)
    for name, value in change.items():
        assert getattr(config, name) == value


def test_generated_data_is_rulers():
    with pytest.raises(ValueError, match="data='generated' needs benchmark='ruler', got 'longbench'"):
        SweepConfig(**GOOD, benchmark="longbench", data="generated")


@pytest.mark.parametrize("name", ["x", "a.b", "x" * 80, "0=1"])
def test_a_folder_is_inside_the_output(tmp_path, name):
    folder = results_folder(tmp_path, SweepConfig(**GOOD | {"name": name}).plain())
    assert folder.parent == tmp_path
    folder.mkdir()
    assert folder.resolve().parent == tmp_path.resolve()


@pytest.mark.parametrize("device", ["cuda:99", "xpu:9"])
def test_a_device_that_this_machine_lacks(model_folder, device):
    with pytest.raises(ValueError, match=f"device must be one of this machine, got '{device}'"):
        load_pipeline(str(model_folder), device=device)
