"""How unevenly a real run keeps: ``python -m benchmarks.kept_counts MODEL`` writes ``data/kept_counts.json``.

The context is this repository's LICENSE, about 2,300 tokens. For every compression ratio, the file holds what each head
kept of it under the package's default press, as a fraction. ``benchmarks.gpu`` draws head lengths from these.
"""

import argparse
import json
from pathlib import Path

DATA = Path(__file__).parent / "data" / "kept_counts.json"
RATIOS = (0.5, 0.75, 0.9)


def measure(model_path: str) -> dict:
    """Kept fractions of every head by ratio, layers outermost, and what they were measured with."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from kvpress_prob import make_press

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    text = (Path(__file__).parents[1] / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(model_path)(text, return_tensors="pt").input_ids
    fractions, settings = {}, ""
    for ratio in RATIOS:
        press = make_press("prob_best", ratio)
        with torch.no_grad(), press(model):
            model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
        assert press.report is not None
        kept = press.report.kept.flatten() / ids.shape[1]
        fractions[str(ratio)] = [round(fraction, 4) for fraction in kept.tolist()]
        settings = press.report.settings
    config = model.config
    return {
        "model": f"{config.num_hidden_layers} layers x {config.num_key_value_heads} KV heads, {config.model_type}",
        "parameters": model.num_parameters(),
        "press": settings,
        "context": f"LICENSE, {ids.shape[1]} tokens",
        "kept_fraction": fractions,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="path or name of a causal language model")
    DATA.write_text(json.dumps(measure(parser.parse_args().model), indent=1) + "\n")
