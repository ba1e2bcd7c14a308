"""The base install is enough for a press; what needs more says so in one line."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvpress_prob.extras import extra

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {
    "jsonargparse",
    "platformdirs",
    "rapidfuzz",
    "rouge",
    "scipy",
    "wonderwords",
    "matplotlib",
    "jinja2",
    "ray",
    "gguf",
}
"""What the extras import; tqdm is transformers' own, triton is torch's choice."""
BLOCKED = f"import sys\nfor name in {sorted(MODULES)}:\n    sys.modules[name] = None\n"
PRESS = """
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
import kvpress_prob
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2, head_dim=8)).eval()
ids, cache = torch.randint(3, 60, (1, 80)), DynamicCache()
press = kvpress_prob.make_press("prob_best", 0.5)
with torch.no_grad(), press(model):
    model(ids, past_key_values=cache)
with torch.no_grad():
    model(ids[:, :3], past_key_values=cache, position_ids=torch.arange(80, 83)[None])
print(round(press.report.achieved_ratio, 1))
"""


def python(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, env=environment, check=False
    )


def test_the_base_install_is_enough_for_a_press():
    done = python(PRESS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.5"


@pytest.mark.parametrize(
    ("module", "package", "name"),
    [
        ("command_line", "jsonargparse", "cli"), ("examples.metrics", "rapidfuzz", "eval"),
        ("examples.generator", "wonderwords", "eval"), ("kvpress_scripts", "platformdirs", "eval"),
        ("records.certification", "scipy", "eval"), ("plots.report", "matplotlib", "plots"),
        ("plots.figures", "matplotlib", "plots"), ("plots.heat_map", "matplotlib", "plots"),
        ("plots.surrogate", "matplotlib", "plots"), ("plots.head_map", "matplotlib", "plots"),
        ("fitting.facts", "wonderwords", "eval"), ("sweeps.worker", "rapidfuzz", "eval"),
    ],
)  # fmt: skip
def test_what_needs_an_extra_says_so(module, package, name):
    code = f"try:\n    import kvpress_prob.{module}\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert re.search(
        rf'needs the package {package}[.\w]*: pip install "kvpress-prob\[{name}\]"$', python(code).stdout.strip()
    )
    assert name in EXTRAS


@pytest.mark.parametrize("words", [["list"], ["sweep", "x.yaml"], ["demo"], []])
def test_the_command_line_says_so_in_one_line(words):
    done = python(f"from kvpress_prob.cli import main\nsys.exit(main({words}))")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert 'pip install "kvpress-prob[cli]"' in done.stderr


def test_every_module_imports_without_extras_or_names_one():
    """No module of the package imports an extra's package unguarded, now and later."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "kvpress_prob").rglob("*.py"))
    ]
    names = [name for name in names if not name.endswith("triton_kernel")]
    code = f"""
from importlib import import_module
for name in {names}:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if "kvpress-prob[" not in str(error):
            print(name, error)
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_development_has_all_extras():
    (own,) = (it for it in map(Requirement, EXTRAS["dev"]) if it.name == "kvpress-prob")
    assert own.extras == set(EXTRAS) - {"dev"}


def test_other_missing_modules_are_left_as_they_are():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'kvpress_prob.nowhere'"), extra("eval", "It"):
        import kvpress_prob.nowhere  # noqa: F401  # pyright: ignore
    message = r'^It needs the package nowhere: pip install "kvpress-prob\[eval\]"$'
    with pytest.raises(ModuleNotFoundError, match=message), extra("eval", "It"):
        import nowhere  # noqa: F401  # pyright: ignore
