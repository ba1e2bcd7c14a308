"""Tables and their intervals."""

from dataclasses import replace

import numpy as np
import pytest

from kvpress_prob.records.statistics import bootstrap_means, interval, tabulate, win_shares
from tests.helpers.records import PRESSES, RATIOS, TASKS, made_up_run


def test_bootstrap_has_the_variance_of_the_stratified_mean():
    """Var(sum w_i x_i) = sum over strata of n_s w_s^2 var_s, estimated without bias."""
    generator = np.random.default_rng(1)
    strata = np.repeat([0, 1], [30, 10])
    values = generator.normal(size=(40, 1)) * (1 + 3 * strata[:, None]) + 10 * strata[:, None]
    weights = np.where(strata == 0, 0.5 / 30, 0.5 / 10)
    draws = bootstrap_means(values, weights, strata, resamples=20000)
    variance = sum((strata == s).sum() * weights[strata == s][0] ** 2 * values[strata == s].var(ddof=1) for s in (0, 1))
    assert draws.mean() == pytest.approx(float((weights @ values)[0]), abs=4 * np.sqrt(variance / 20000))
    assert draws.var() == pytest.approx(variance, rel=4 * np.sqrt(2 / 20000))


def test_intervals_cover():
    """Percentile intervals of the mean of 40 normals cover it in about 95 % of 400 trials (z bound of four sigma, less
    the known undercoverage of the percentile method at this size)."""
    generator = np.random.default_rng(2)
    trials, n = 400, 40
    samples = generator.normal(size=(n, trials))
    low, high = interval(bootstrap_means(samples, np.full(n, 1 / n), np.zeros(n)))
    covered = ((low < 0) & (high > 0)).mean()
    assert 0.94 - 4 * np.sqrt(0.95 * 0.05 / trials) < covered <= 0.99


def test_a_single_example_has_no_interval():
    draws = bootstrap_means(np.ones((3, 1)), np.full(3, 1 / 3), np.array([0, 0, 1]))
    assert np.isnan(draws).all()
    _, _, records = made_up_run(1)
    assert tabulate(records).scores[["low", "high"]].isna().all(axis=None)


def test_questions_of_a_context_come_together():
    """The variance of a mean over clusters: that of the mean of the clusters' means."""
    generator = np.random.default_rng(4)
    clusters = np.repeat(np.arange(12), 5)
    values = (generator.normal(size=12)[clusters] + 0.1 * generator.normal(size=60))[:, None]
    means = values.reshape(12, 5).mean(1)
    together = bootstrap_means(values, np.full(60, 1 / 60), np.zeros(60), clusters, resamples=20000)
    assert together.var() == pytest.approx(means.var(ddof=1) / 12, rel=4 * np.sqrt(2 / 20000))
    alone = bootstrap_means(values, np.full(60, 1 / 60), np.zeros(60), resamples=20000)
    assert alone.var() < together.var() / 3
    names = np.array([f"c{cluster}" for cluster in clusters])
    np.testing.assert_array_equal(
        together, bootstrap_means(values, np.full(60, 1 / 60), np.zeros(60), names, resamples=20000)
    )


def test_a_context_over_two_tasks_is_its_own_kind():
    strata, clusters = np.array(["a", "b", "a", "b", "a", "a"]), np.array([0, 0, 1, 1, 2, 3])
    draws = bootstrap_means(np.eye(6), np.ones(6), strata, clusters)
    assert (draws[:, 0] == draws[:, 1]).all()
    assert set(draws[:, 0]) == {0.0, 2.0}
    assert (draws[:, 0] + draws[:, 2] == 2).all()
    assert (draws[:, 4] + draws[:, 5] == 2).all()
    one = bootstrap_means(np.ones((3, 1)), np.ones(3), np.zeros(3), np.zeros(3))
    assert np.isnan(one).all()


def test_tables_resample_contexts():
    """Two questions of every context: intervals as wide as with one of them."""
    _, _, records = made_up_run(6)
    doubled = records + [replace(record, example=record.example + "-again") for record in records]
    once, twice = tabulate(records).scores, tabulate(doubled).scores
    assert (twice["examples"] == 2 * once["examples"]).all()
    for name in ("score", "low", "high"):
        assert twice[name].tolist() == pytest.approx(once[name].tolist())


def test_resamples_are_paired():
    values = np.random.default_rng(0).normal(size=(20, 1))
    draws = bootstrap_means(np.hstack([values, 2 * values]), np.full(20, 1 / 20), np.zeros(20))
    np.testing.assert_allclose(draws[:, 1], 2 * draws[:, 0])


def test_win_shares_by_hand():
    scores = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 2.0], [5.0, 5.0, 5.0]])
    want = np.array([[2, 2, 0], [0, 1, 2], [2, 2, 2]]) / 2
    np.testing.assert_array_equal(win_shares(scores), want)
    np.testing.assert_array_equal(win_shares(np.ones((2, 1))), np.zeros((2, 1)))


def test_tables_against_loops():
    _, examples, records = made_up_run(5, seeds=(0, 1))
    tables = tabulate(records)
    score = {}
    for record in records:
        score.setdefault((record.press, record.ratio, record.example), []).append(record.score)
    for row in tables.scores.itertuples():
        names = [example.name for example in examples if row.task in ("all", example.task)]
        want = np.mean([np.mean(score[row.press, row.ratio, name]) for name in names])
        assert row.score == pytest.approx(want)
        assert row.low <= row.score <= row.high
        assert row.examples == len(names)
    ratio = RATIOS[1]
    seeded = {(r.press, r.ratio, r.example, r.seed): r.score for r in records}
    others = [press for press in PRESSES if press != "no_press"]
    for row in tables.wins[tables.wins["ratio"] == ratio].itertuples():
        tasks = []
        for task in TASKS:
            wins = []
            for example in (example.name for example in examples if example.task == task):
                for seed in (0, 1):
                    of = {
                        p: seeded.get((p, ratio, example, seed), seeded.get((p, ratio, example, None))) for p in others
                    }
                    wins.append(np.mean([of[row.press] >= of[other] for other in others if other != row.press]))
            tasks.append(np.mean(wins))
        assert row.win == pytest.approx(np.mean(tasks))
    pair = tables.differences.query("press == 'prob_best' and other == 'knorm' and ratio == 0.9").iloc[0]
    totals = tables.scores.query("task == 'all' and ratio == 0.9").set_index("press")["score"]
    assert pair["difference"] == pytest.approx(totals["prob_best"] - totals["knorm"])
    mirrored = tables.differences.query("press == 'knorm' and other == 'prob_best' and ratio == 0.9").iloc[0]
    assert (pair["low"], pair["high"]) == pytest.approx((-mirrored["high"], -mirrored["low"]))


def test_budgets_layers_and_costs():
    _, examples, records = made_up_run(2)
    tables = tabulate(records)
    budget = tables.budgets.set_index(["press", "ratio"])
    assert budget.loc[("adakv_snapkv", 0.9), "masked"]
    assert budget.loc[("adakv_snapkv", 0.9), "bytes_fraction"] == 1
    assert budget.loc[("snapkv", 0.9), "bytes_fraction"] == pytest.approx(0.1, abs=1e-5)
    assert budget.loc[("prob_best", 0.5), "effective"] == pytest.approx(0.7)
    part = tables.layers.query("press == 'prob_best' and ratio == 0.5")
    assert part["layer_ratio"].tolist() == pytest.approx([0.45, 0.55])
    contexts, presses = len(examples), len(PRESSES)
    settings = 1 + (presses - 1) * len(RATIOS)
    assert tables.overview["decode_seconds"] == pytest.approx(contexts * settings * 0.01)


def test_unfinished_runs_compare_what_is_complete():
    _, examples, records = made_up_run(3)
    kept = [record for record in records if not (record.example == examples[-1].name and record.press == "knorm")]
    tables = tabulate(kept)
    assert set(tables.scores.query("task == 'all'")["examples"]) == {len(examples) - 1}
    apart = [record for record in records if (record.press == "knorm") == (record.example == examples[0].name)]
    tables = tabulate(apart)
    assert tables.scores.empty
    assert tables.wins.empty
    assert tables.differences.empty
    assert len(tables.budgets)


def test_runs_without_answers_or_errors():
    _, _, records = made_up_run(2)
    silent = [replace(record, score=None, prediction=None) for record in records]
    tables = tabulate(silent)
    assert tables.scores.empty
    assert tables.wins.empty
    assert tables.differences.empty
    assert len(tables.errors)
    assert tabulate([replace(record, attention_error=None) for record in records]).errors.empty
