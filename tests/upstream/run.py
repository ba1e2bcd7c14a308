"""Runs kvpress' own tests with this package's presses in their matrix (``make upstream-tests``).

Takes the source archive of the installed version from the package index, puts a tiny random model in place of the Hub
model that the tests load, and runs them with ``kvpress_plugin``. Exit code 0 if exactly the tests fail that the plugin
lists.
"""

import argparse
import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HUB_NAMES = ("MaxJeblick/llama2-0b-unit-test", "maxjeblick/llama2-0b-unit-test")
VOCABULARY = 4096
TEXT = [
    "This is a test article. It was written on 2022-01-01.\n",
    "When was this article written?\n",
    "The quick brown fox jumps over the lazy dog. What animal jumps over the dog?\n",
]


def make_model(folder: Path) -> None:
    """A random model, and a tokenizer that splits kvpress' test sentence into 23 tokens as theirs does."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    backend = Tokenizer(BPE(unk_token="<unk>"))
    backend.pre_tokenizer = split
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.train_from_iterator(
        TEXT * 50,
        BpeTrainer(
            vocab_size=512,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=[chr(code) for code in range(32, 127)],
            show_progress=False,
        ),
    )
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    # Whatever a random model generates must read as something.
    backend.add_tokens([f"<{index}>" for index in range(backend.get_vocab_size(), VOCABULARY)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def fetch(package: str, folder: Path) -> Path:
    """Unpack the source archive of the installed version; returns its root."""
    name = f"{package}-{version(package)}"
    if not (folder / name).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(folder), f"{package}=={version(package)}"], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/upstream"), help="where sources are unpacked")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    root, model = fetch("kvpress", folder), folder / "model"
    make_model(model)
    for file in (root / "tests").rglob("*.py"):
        text = file.read_text()
        for name in HUB_NAMES:
            text = text.replace(f'"{name}"', f'"{model}"')
        file.write_text(text)
    here = Path(__file__).parent
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    arguments = ["-q", "-rfExs", "-p", "kvpress_plugin", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore"]
    # Their integration test needs a data set of the Hub, a GPU and flash attention.
    command = [sys.executable, "-m", "pytest", *arguments, "--ignore=tests/integration", "tests"]
    return subprocess.run(command, cwd=root, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
