"""Made-up records of a whole run, for tables, figures and the report page."""

import random

from kvpress_prob.records import Example, Record

PRESSES = ("no_press", "prob_min_h", "prob_best", "snapkv", "knorm", "adakv_snapkv")
SKILL = {"no_press": 0.0, "prob_best": 0.3, "prob_min_h": 0.5, "snapkv": 0.6, "adakv_snapkv": 0.55, "knorm": 0.9}
"""Chance of failing at ratio 1."""
RATIOS = (0.1, 0.5, 0.9)
TASKS = ("niah_single_1", "niah_multikey_1", "vt")


def made_up_run(
    examples_per_task: int = 4, *, seeds: tuple[int, ...] = (0,), presses: tuple[str, ...] = PRESSES
) -> tuple[dict, list[Example], list[Record]]:
    """Configuration, examples and records."""
    rng = random.Random(0)
    config = {
        "name": "made-up",
        "model": "tiny",
        "benchmark": "ruler",
        "presses": list(presses),
        "ratios": list(RATIOS),
    }
    examples = [
        Example(f"{task}/{i}", "ruler", task, f"hash{task}{i}", f"What is the <b>code</b> of {task}, number {i}? ",
                "The code is", [str(1000 + i), "second & last"], 8)
        for task in TASKS
        for i in range(examples_per_task)
    ]  # fmt: skip
    records = []
    for example in examples:
        for press in presses:
            draws = press.startswith("prob_")
            for ratio in (0.0,) if press == "no_press" else RATIOS:
                for seed in seeds if draws else (None,):
                    right = rng.random() > SKILL.get(press, 0.5) * ratio
                    records.append(_record(example, press, ratio, seed, right))
    return config, examples, records


def _record(example: Example, press: str, ratio: float, seed: int | None, right: bool) -> Record:
    masked = press == "adakv_snapkv"
    return Record(
        example=example.name,
        context=example.context,
        task=example.task,
        press=press,
        ratio=ratio,
        seed=seed,
        query_aware=False,
        masked=masked,
        achieved_ratio=ratio,
        layer_ratios=[ratio - 0.05, ratio + 0.05] if press.startswith("prob_") else [ratio, ratio],
        effective_fraction=0.7 if press.startswith("prob_") else None,
        context_tokens=1000,
        dense_bytes=10**6,
        cache_bytes=10**6 if masked else int((1 - ratio) * 10**6),
        prefill_ms=100.0,
        score_ms=50.0,
        score_spent_ms=50.0 if ratio in (0.0, RATIOS[0]) else 0.0,
        compress_ms=3.0,
        decode="batched",
        decode_ms=None,
        batch_ms=160.0,
        batch_rows=16,
        generated_tokens=7,
        prediction=f" {example.answers[0]} </script><i>x" if right else " nothing\nof the kind",
        score=50.0 if right else 0.0,
        attention_error=0.1 + ratio / 2,
        attention_error_abs=0.01 + ratio / 20,
        config="0123456789",
        versions="torch 0",
        git_commit=None,
    )
