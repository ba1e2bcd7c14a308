"""The demo's figures are what they are called."""

import matplotlib.image
import pytest
import torch
from transformers import DynamicCache

from kvpress_prob.demo.comparison import QUESTIONS, SHOWN, demo_text, run_demo, tabulate
from kvpress_prob.plots.heat_map import kept_heat_map
from kvpress_prob.prefills.press_spec import PressSpec

TEXT = "".join(f"Note {i}: the quick brown fox jumps over dog {i * i}. " for i in range(7))
TOKENS = 5


@pytest.fixture(scope="module")
def rows(pipe):
    torch.set_num_threads(1)
    return run_demo(pipe, TEXT, ["Which fox?", "Why?"], ratios=[0.5, 0.8], seed=3, tokens=TOKENS, progress=False)


def log_probabilities(model, cache, ids, context):
    """After each held-back token, all of them fed at once, in double precision."""
    positions = torch.arange(context, ids.shape[1]).unsqueeze(0)
    logits = model(input_ids=ids[:, context:], past_key_values=cache, position_ids=positions).logits
    return logits[0].double().log_softmax(-1)


def test_divergence_is_that_of_kvpress_own_way(rows, pipe):
    """A press around the prefill, then the held-back tokens in one pass; KL(dense || compressed), mean over tokens."""
    ids = pipe.preprocess(TEXT, [], "", 10_000)["context_ids"]
    context = ids.shape[1] - TOKENS
    results = {}
    for row in rows:
        press = PressSpec(row.press).build()
        cache = DynamicCache()
        if press is None:
            pipe.model(ids[:, :context], past_key_values=cache)
        else:
            press.compression_ratio = row.ratio
            if hasattr(press, "seed"):
                press.seed = 3
            with press(pipe.model):
                pipe.model(ids[:, :context], past_key_values=cache)
        results[row.press, row.ratio] = log_probabilities(pipe.model, cache, ids, context)
    dense = results["no_press", 0.0]
    for row in rows:
        log_q = results[row.press, row.ratio]
        want = (dense.exp() * (dense - log_q)).sum(-1).mean()
        assert row.divergence == pytest.approx(float(want), rel=1e-3, abs=1e-6)
        assert row.ratio == 0 or row.divergence > 1e-4


def test_answers_are_the_pipelines(rows, pipe):
    """The question follows the context after an empty line."""
    context = pipe.tokenizer.decode(pipe.preprocess(TEXT, [], "", 10_000)["context_ids"][0, :-TOKENS])
    got = pipe(context.removeprefix("<bos>"), questions=["\n\nWhich fox?", "\n\nWhy?"], max_new_tokens=24)["answers"]
    assert rows[0].answers == [" ".join(answer.split()) for answer in got]


def test_rows_and_their_figures(rows):
    settings = [(row.press, row.ratio) for row in rows]
    assert settings == [("no_press", 0.0), *((press, ratio) for ratio in (0.5, 0.8) for press in SHOWN)]
    for row in rows:
        assert row.achieved_ratio == pytest.approx(row.ratio, abs=0.02)
        assert row.step_ms > 0
        assert len(row.answers) == 2
        if row.press.startswith("prob_"):
            assert row.kept.shape == (2, 2)
            assert 1 - float(row.kept.mean()) == pytest.approx(row.achieved_ratio, abs=1e-6)
        else:
            assert row.kept is None
            assert row.cache_bytes == pytest.approx((1 - row.ratio) * row.dense_bytes, rel=0.01)


def test_table(rows):
    table = tabulate(rows)
    assert list(table) == ["press", "r", "achieved", "KL", "MB before", "MB after", "ms/token", "answer 1", "answer 2"]
    assert len(table) == len(rows)
    assert table["KL"].iloc[0] == 0


def test_seed_decides_the_draw(rows, pipe):
    again, other = (run_demo(pipe, TEXT, [], ratios=[0.5], seed=seed, tokens=TOKENS, progress=False) for seed in (3, 4))
    assert [row.divergence for row in again] == [row.divergence for row in rows if row.ratio < 0.6]
    assert [row.press for row in other if row.divergence != again[other.index(row)].divergence] == [
        "prob_learned",
        "prob_min_h",
        "prob_best",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratios": [0.5, 1.0]}, r"ratios must be in \(0, 1\), got 1.0"),
        ({"ratios": [0.0]}, r"ratios must be in \(0, 1\), got 0.0"),
        ({"ratios": [0.5, 0.5]}, "ratios must be different from each other, got 0.5 twice"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\^63\), got -1"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"tokens": 300}, r"text must have at least 128 \+ 300 tokens, got"),
        ({"text": 30 * TEXT}, "text and question must fit into the model's 8192 positions, got"),
    ],
)
def test_bad_input(pipe, change, message):
    arguments = {"text": TEXT, "questions": ["Why?"], "ratios": [0.5], "seed": 0, "tokens": TOKENS, **change}
    with pytest.raises(ValueError, match=message):
        run_demo(pipe, arguments.pop("text"), arguments.pop("questions"), **arguments)


def test_own_text_is_long_and_holds_the_planted_fact():
    text = demo_text()
    assert 2_300 < len(text.split()) < 2_700
    assert text.count("The access code of the red cabinet is 4817.") == 1
    assert QUESTIONS[0] == "What is the access code of the red cabinet?"
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_heat_map(tmp_path):
    kept = {"r = 0.5": torch.rand(6, 3), "r = 0.8": torch.rand(6, 3)}
    figure = kept_heat_map(kept)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == list(kept)
    for axes, fractions in zip(panels, kept.values(), strict=True):
        (image,) = axes.get_images()
        assert torch.equal(torch.from_numpy(image.get_array().data), fractions)
        assert image.get_clim() == (0, 1)
    figure.savefig(tmp_path / "kept.png")
    assert matplotlib.image.imread(tmp_path / "kept.png").ndim == 3
    with pytest.raises(ValueError, match="kept must not be empty"):
        kept_heat_map({})
