"""The loss of reference answers over compressed contexts, on a tiny model."""

import pandas as pd
import pytest
import torch

from benchmarks import reference_loss
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.prefills.compressors import compressor
from kvpress_prob.prefills.shared_prefill import SharedPrefill
from kvpress_prob.records import NO_PRESS, Example
from tests.helpers.evaluation import ruler_rows, save_tiny_model, write_rows


@pytest.fixture
def data(tmp_path):
    """LongBench rows: two accepted answers, the second one empty in one row."""
    rows = [
        {**row, "task": "hotpotqa", "answers": answers, "all_classes": None}
        for row, answers in zip(ruler_rows(3), (["111", "one"], ["222"], ["333", ""]), strict=True)
    ]
    save_tiny_model(tmp_path / "model")
    return write_rows(tmp_path / "rows.jsonl", rows)


def test_the_dense_loss_is_the_models_own(data, tmp_path):
    pipe = load_pipeline(str(tmp_path / "model"))
    example = Example(name="a", benchmark="longbench", task="hotpotqa", context="One two three four. " * 6,
                      question="Which? ", answer_prefix="It is", answers=["two", "three"], all_classes=None,
                      max_new_tokens=4)  # fmt: skip
    context, question, answers = reference_loss.tokenized(pipe, example)
    shared = SharedPrefill.run(pipe.model, context)
    found = reference_loss.loss(
        pipe.model, compressor(None, shared).compress(0.0, None), shared.tokens, question, answers
    )
    wanted = []
    for answer in answers:
        ids = torch.cat((context, question, answer), 1)
        log_p = pipe.model(ids).logits[0].log_softmax(-1)
        start = ids.shape[1] - answer.shape[1]
        wanted.append(-torch.stack([log_p[i - 1, ids[0, i]] for i in range(start, ids.shape[1])]).mean().item())
    assert found == pytest.approx(min(wanted), rel=1e-4)
    assert abs(wanted[0] - wanted[1]) > 1e-3


def test_rows_and_table(data, tmp_path, capsys):
    output = tmp_path / "rows.jsonl.out"
    presses = ["prob_fast", "snapkv", "adakv_snapkv"]
    reference_loss.main(
        ["--model", str(tmp_path / "model"), "--data", str(data), "--entries", "80", "140", "--press", *presses,
         "--output", str(output)]
    )  # fmt: skip
    frame = pd.read_json(output, lines=True)
    assert len(frame) == 3 * (1 + 3 * 2)
    compressed = frame[frame["press"] != NO_PRESS]
    few = compressed[compressed["entries"] == 80]
    assert ((few["bytes_over_dense"] >= 1) == (few["press"] == "adakv_snapkv")).all()
    assert (compressed["ratio"] - (1 - compressed["entries"] / compressed["context_tokens"])).abs().max() < 1e-6
    table = reference_loss.tabulate(frame)
    assert ((table["low"] <= table["over dense"]) & (table["over dense"] <= table["high"])).all()
    dense = frame[frame["press"] == NO_PRESS]["loss"].mean()
    for row in table.itertuples():
        mine = frame[(frame["press"] == row.press) & (frame["entries"] == row.entries)]["loss"].mean()
        assert row._3 == pytest.approx(mine - dense)
    assert "loss over it" in capsys.readouterr().out


def test_data_is_required(capsys):
    with pytest.raises(SystemExit):
        reference_loss.main([])
    assert "--data" in capsys.readouterr().err
