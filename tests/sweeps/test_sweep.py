"""A sweep's predictions are those of every press run alone through kvpress' pipeline."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from kvpress_prob import ProbabilisticPress
from kvpress_prob.cli import COMMANDS
from kvpress_prob.command_line import parse
from kvpress_prob.prefills import compressors, shared_prefill
from kvpress_prob.prefills.press_spec import PressSpec, press_names
from kvpress_prob.records import NO_PRESS, read_config, read_examples, read_records
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.local_engine import run_sweep
from kvpress_prob.sweeps.plan import examples_of, plan, settings_of
from kvpress_prob.sweeps.worker import Worker
from tests.helpers.evaluation import ruler_rows, save_tiny_model, write_rows

RATIOS = [0.3, 0.7]
# SnapKV's window is more than what tiny contexts may keep.
pytestmark = pytest.mark.filterwarnings("ignore:protected entries alone exceed the budget")


def sweep_config(model_folder, ruler_file, **changes) -> SweepConfig:
    settings = {
        "name": "test", "model": str(model_folder), "data": str(ruler_file), "ratios": RATIOS,
        "presses": [NO_PRESS, "prob_min_h", "snapkv", "adakv_snapkv"],
    }  # fmt: skip
    return SweepConfig(**{**settings, **changes})


def alone(pipe, row: dict, press, ratio: float, seed: int, *, query_aware: bool = False) -> str:
    """kvpress' pipeline, one press, one question."""
    context, question = row["context"], row["question"]
    if query_aware:
        context, question = context + question, ""
    if press is not None:
        press.compression_ratio = ratio
        if isinstance(press, ProbabilisticPress):
            press.seed = seed
    torch.manual_seed(seed)  # kvpress' presses draw from the global state
    return pipe(
        context, question=question, answer_prefix=row["answer_prefix"], press=press,
        max_new_tokens=row["max_new_tokens"],
    )["answer"]  # fmt: skip


@pytest.mark.parametrize("decode", ["single", "batched"])
@pytest.mark.parametrize("name", press_names())
def test_predictions_equal_the_pipeline(pipe, model_folder, tmp_path, name, decode):
    # ChunkKV's layers are of equal lengths, as kvpress' pipeline needs them, if its chunks of 20 tokens are all full.
    data = ruler_rows(characters=159)
    ruler_file = write_rows(tmp_path / "rows.jsonl", data)
    config = sweep_config(model_folder, ruler_file, presses=[name], seeds=[0, 5], decode=decode)
    worker = Worker(config, pipe)
    records = [record for units in plan(config, examples_of(config)) for rows in worker.run(units) for record in rows]
    rows = dict(zip([example.name for example in examples_of(config)], data, strict=True))
    assert len(records) == len(rows) * len(settings_of(config))
    for record in records:
        want = alone(pipe, rows[record.example], PressSpec(name).build(), record.ratio, record.seed or 0)
        assert record.prediction == want, (record.press, record.ratio, record.seed)
    if name != NO_PRESS:
        changed = {record.prediction for record in records} - {alone(pipe, row, None, 0, 0) for row in rows.values()}
        assert changed, "no press changed any answer: the comparison shows nothing"


@pytest.mark.parametrize("decode", ["single", "batched"])
def test_query_aware_and_chat_template(tmp_path, ruler_file, decode):
    folder = save_tiny_model(tmp_path / "chat", chat=True, seed=1)
    config = sweep_config(folder, ruler_file, query_aware=True, decode=decode)
    worker = Worker(config)
    examples = examples_of(config)
    rows = dict(zip([example.name for example in examples], ruler_rows(), strict=True))
    for units in plan(config, examples):
        for record in itertools.chain(*worker.run(units)):
            assert record.query_aware
            press = PressSpec(record.press).build()
            assert record.prediction == alone(
                worker.pipe, rows[record.example], press, record.ratio, record.seed or 0, query_aware=True
            )


def test_one_prefill_for_all_presses(pipe, model_folder, ruler_file, monkeypatch):
    """10 presses x 2 ratios x 2 seeds: one prefill a context, one scoring a press and layer."""
    prefills, scored = [], []
    run = shared_prefill.SharedPrefill.run.__func__
    monkeypatch.setattr(
        shared_prefill.SharedPrefill, "run",
        classmethod(lambda cls, *args: prefills.append(1) or run(cls, *args)),
    )  # fmt: skip
    presses = [
        "prob_min_h",
        "prob_h2o",
        "prob_snapkv",
        "snapkv",
        "tova",
        "knorm",
        "h2o",
        "keydiff",
        "adakv_snapkv",
        PressSpec("prob_min_h", {"temperature": 2.0}),
    ]
    for name in ("H2OPress", "MinVariancePress", "SnapKVPress", "TOVAPress", "KnormPress", "KeyDiffPress"):
        kind = getattr(compressors, name)
        score = kind.score
        monkeypatch.setattr(
            kind, "score", lambda self, *args, score=score, name=name: scored.append(name) or score(self, *args)
        )
    config = sweep_config(model_folder, ruler_file, presses=presses, seeds=[0, 1])
    contexts = plan(config, examples_of(config))
    worker = Worker(config, pipe)
    for units in contexts:
        list(worker.run(units))
    assert len(prefills) == len(contexts) == 3
    # Presses that only draw differently share their proposals, so nine scorings a layer and not ten.
    assert len(scored) == 9 * 2 * len(contexts)


def test_records_say_what_they_measured(pipe, model_folder, ruler_file, tmp_path):
    config = sweep_config(
        model_folder, ruler_file, presses=[NO_PRESS, "prob_best", "snapkv", "adakv_snapkv", "kvzip"], ratios=[0.5],
        decode="single", attention_error=True,
    )  # fmt: skip
    folder = run_sweep(config, tmp_path, progress=False)
    assert folder.name.startswith("test-")
    assert read_config(folder)["ratios"] == [0.5]
    assert len(read_examples(folder)) == 4
    records = {record.press: record for record in read_records(folder)}
    dense = records[NO_PRESS]
    itemsize, width, heads, layers = 4, 16, 2, 2
    assert dense.cache_bytes == dense.dense_bytes == dense.context_tokens * heads * layers * 2 * width * itemsize
    assert (dense.achieved_ratio, dense.attention_error, dense.attention_error_abs) == (0, 0, 0)
    kept = int(dense.context_tokens * 0.5)
    assert records["snapkv"].cache_bytes == kept * heads * layers * 2 * width * itemsize
    assert records["prob_best"].achieved_ratio == pytest.approx(0.5, abs=0.01)
    assert records["prob_best"].cache_bytes < dense.cache_bytes
    assert 0 < records["prob_best"].effective_fraction < 1
    for name in ("adakv_snapkv", "kvzip"):  # masking presses hold everything, KVzip its reconstruction too
        assert records[name].masked
        assert records[name].cache_bytes >= dense.cache_bytes
        assert records[name].achieved_ratio == pytest.approx(0.5, abs=0.01)
    assert not records["snapkv"].masked
    for record in records.values():
        assert record.decode_ms > 0
        assert record.batch_ms is None
        assert not record.query_aware
        assert record.config == folder.name.removeprefix("test-")
        assert "torch" in record.versions
    assert records["snapkv"].attention_error > 0.01


def test_a_batch_has_no_time_of_a_row(pipe, model_folder, ruler_file):
    config = sweep_config(model_folder, ruler_file, presses=["snapkv"])
    units = plan(config, examples_of(config))[0]
    for rows in Worker(config, pipe).run(units):
        for record in rows:
            assert record.decode_ms is None
            assert record.batch_ms > 0
            assert record.batch_rows == len(units[0].settings) == 2


def test_batches_are_as_small_as_asked(pipe, model_folder, ruler_file):
    config = sweep_config(model_folder, ruler_file, batch_rows=3)
    units = plan(config, examples_of(config))[0]
    assert [len(unit.settings) for unit in units] == [3, 3, 1]
    whole = Worker(sweep_config(model_folder, ruler_file), pipe)
    by_key = {record.key: record for rows in whole.run(plan(whole.config, examples_of(config))[0]) for record in rows}
    for rows in Worker(config, pipe).run(units):
        for record in rows:
            assert record.prediction == by_key[record.key].prediction


def test_nothing_is_left_on_the_model(pipe, model_folder, ruler_file):
    config = sweep_config(model_folder, ruler_file, presses=press_names(), decode="single", attention_error=True)
    modules = [layer.self_attn for layer in pipe.model.model.layers]
    before = [set(vars(module)) | set(module._modules) for module in modules]
    list(Worker(config, pipe).run(plan(config, examples_of(config))[0]))
    for module, names in zip(modules, before, strict=True):
        assert (set(vars(module)) | set(module._modules)) - names <= {"masked_key_indices"}
        assert module.masked_key_indices is None
        assert not module._forward_hooks
    assert not pipe.model._forward_pre_hooks
    assert pipe.model.config._attn_implementation == "sdpa"


def test_budgets_in_entries(pipe, model_folder, ruler_file, tmp_path):
    """Every context keeps as many, whatever its length; records say what they would be in a nominal context."""
    presses = [NO_PRESS, "contourkv_window", "prob_fast", "snapkv", "adakv_snapkv_physical", "kvzip_physical", "h2o"]
    config = sweep_config(
        model_folder, ruler_file, presses=presses, ratios=[], entries=[66, 100, 4000], length=4096, decode="single"
    )
    folder = run_sweep(config, tmp_path, progress=False)
    records = read_records(folder)
    ratios = {66: 0.983887, 100: 0.975586, 4000: 0.023438}
    assert {record.ratio for record in records} == {0.0, *ratios.values()}
    for record in records:
        entries = next((it for it, ratio in ratios.items() if ratio == record.ratio), record.context_tokens)
        kept = (1 - record.achieved_ratio) * record.context_tokens
        slack = 1 if record.press == "prob_fast" else 0.3  # a draw is off by up to an entry a head
        assert kept == pytest.approx(min(entries, record.context_tokens), abs=slack), record.press
        even = record.press in (NO_PRESS, "snapkv", "h2o") or entries > record.context_tokens
        assert (record.padded_ratio == 1) == even
        assert not record.masked
    again = run_sweep(config, tmp_path, progress=False)
    assert again == folder
    assert read_records(folder) == records


def test_masked_and_evicted_copies_have_one_padded_ratio(pipe, model_folder, ruler_file):
    presses = ["adakv_snapkv", "adakv_snapkv_physical"]
    config = sweep_config(model_folder, ruler_file, presses=presses, ratios=[0.5])
    (rows,) = Worker(config, pipe).run(plan(config, examples_of(config))[0])
    masked, evicted = (record for record in rows if record.example == rows[0].example)
    assert masked.padded_ratio == evicted.padded_ratio > 1


def test_a_configuration_without_entries_has_the_hash_it_had(model_folder, ruler_file):
    assert "entries" not in sweep_config(model_folder, ruler_file).plain()
    assert sweep_config(model_folder, ruler_file, ratios=[], entries=[64]).plain()["entries"] == [64]


def test_records_of_before_padded_ratios_are_read(pipe, model_folder, ruler_file, tmp_path):
    folder = run_sweep(sweep_config(model_folder, ruler_file, presses=["knorm"]), tmp_path, progress=False)
    file = folder / "records.jsonl"
    file.write_text(re.sub(r',"padded_ratio":[0-9.]+', "", file.read_text()))
    assert {record.padded_ratio for record in read_records(folder)} == {None}
    file.write_text(re.sub(r',"config":"[^"]+"', "", file.read_text()))
    with pytest.raises(ValueError, match=r"line 1: fields must be the schema's, got a difference in \['config'\]"):
        read_records(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entries": [64]}, r"ratios must be empty where entries are given, got \[0.3, 0.7\]"),
        ({"ratios": [], "entries": [0]}, "entries must be at least 1, got 0"),
        ({"ratios": [], "entries": [4096]}, "entries must be fewer than length = 4096, got 4096"),
        ({"ratios": [], "entries": []}, "entries must not be empty"),
        ({"presses": [PressSpec("prob_fast", {"entries_per_head": 64})]}, "sets budget and seed itself"),
        ({"ratios": [1.0]}, r"ratios must be in \[0, 1\), got 1.0"),
        ({"ratios": []}, "ratios must not be empty"),
        ({"presses": ["snap"]}, r"press must be one of \['no_press', .*got 'snap'"),
        ({"presses": ["tova", "tova"]}, "different from each other, got 'tova' twice"),
        ({"presses": [PressSpec("snapkv", {"window": 3})]}, "options of SnapKVPress must be among .*got 'window'"),
        ({"presses": [PressSpec("prob_min", {"seed": 3})]}, "sets budget and seed itself"),
        ({"presses": [PressSpec("prob_min", {"temperature": 0})]}, "temperature must be a number > 0, got 0"),
        ({"presses": [PressSpec("no_press", {"x": 0})]}, "options of no_press must be empty"),
        ({"presses": [PressSpec("kvzip", {"chunk_size": 0})]}, "options of kvzip must be valid.*positive"),
        ({"batch_rows": 0}, "batch_rows must be at least 1, got 0"),
    ],
)
def test_bad_configurations(model_folder, ruler_file, changes, message):
    with pytest.raises(ValueError, match=message):
        sweep_config(model_folder, ruler_file, **changes)


def test_options_reach_wrapped_presses():
    press = PressSpec("prob_min_h", {"press.max_rows": 8, "temperature": 3.0, "press.centered": True}).build()
    assert (press.press.max_rows, press.press.centered, press.temperature) == (8, True, 3.0)
    assert PressSpec("tova", label="x").name == "x"
    assert PressSpec("prob_min", {"temperature": 3.0}).name == "prob_min(temperature=3.0)"


@pytest.mark.parametrize("kind", compressors.RATIO_FREE, ids=lambda kind: kind.__name__)
def test_remembered_scores_do_not_depend_on_the_ratio(pipe, kind):
    ids = torch.randint(3, 99, (1, 120))
    shared = shared_prefill.SharedPrefill.run(pipe.model, ids)
    layer = shared.layers[1]
    scores = []
    with shared.rotary():
        for ratio in (0.1, 0.9):
            press = kind(compression_ratio=ratio)
            press.post_init_from_model(pipe.model)
            scores.append(press.score(layer.module, layer.hidden_states, layer.keys, layer.values, None, layer.kwargs))
    assert torch.equal(*scores)


def test_same_context_is_one_unit(model_folder, ruler_file, tmp_path):
    config = sweep_config(model_folder, ruler_file)
    contexts = plan(config, examples_of(config))
    assert sorted(len(units[0].examples) for units in contexts) == [1, 1, 2]
    other = write_rows(tmp_path / "one.jsonl", ruler_rows(1))
    assert len(plan(config, examples_of(sweep_config(model_folder, other)))) == 1


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_configurations_are_valid(file):
    _, options = parse(COMMANDS, ["sweep", str(file)], "0")
    config = options["config"]
    assert config.name.replace("-", "_") == file.stem.replace("-", "_")
    assert settings_of(config)


def test_options_reach_into_sources_and_components():
    press = PressSpec("prob_best", {"press.0.press.source.fraction": 0.5, "press.1.press.max_rows": 64}).build()
    assert press.press[0].press.source.fraction == 0.5
    assert press.press[1].press.max_rows == 64
    assert PressSpec("prob_best").build().press[0].press.source.fraction == 1
    for key, message in (
        ("press.2.share", r"options of list must be among \['0', '1'\]"),
        ("press.0.press.source.part", "options of Reconstruction must be among .*got 'part'"),
        ("sampler.x", r"options of str must be among \[\]"),
        ("press.0.press.compression_ratio", "options of AttentionPress must be among .*sets budget and seed"),
    ):
        with pytest.raises(ValueError, match=message):
            PressSpec("prob_best", {key: 1}).build()
