"""Scores of single predictions, equal to those of kvpress' RULER and LongBench scorers, 0 to 100.

kvpress' scorers are not loaded because they are in its source archive and not in its wheel, so that every score would
need a download; the tests compare with what they gave.

Where kvpress scores a whole table and rounds, a score here belongs to one prediction and is not rounded, so that
examples can be resampled and compared in pairs; the mean over a table is kvpress' number.
"""

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvpress_prob.examples.tasks import BENCHMARKS
from kvpress_prob.extras import extra
from kvpress_prob.records import Benchmark

with extra("eval", "Scoring predictions"):
    from rapidfuzz import fuzz
    from rouge import Rouge

FIRST_LINE_TASKS = ("trec", "triviaqa", "samsum")
"""LongBench tasks of which only the prediction's first line counts: their contexts are worked examples, which models
continue."""


def score_prediction(
    benchmark: Benchmark, task: str, prediction: str, answers: list[str], all_classes: list[str] | None = None
) -> float:
    """Score of one prediction against its accepted answers.

    Parameters
    ----------
    benchmark : {"ruler", "longbench"}
    task : str
        Decides the metric.
    prediction : str
    answers : list of str
        RULER: all of them are wanted, or any for its question-answering tasks. LongBench: the best match counts.
    all_classes : list of str, optional
        Class names, for LongBench's trec.

    Raises
    ------
    ValueError
        For an unknown benchmark or LongBench task, or without answers.
    """
    if benchmark not in BENCHMARKS:
        raise ValueError(f"benchmark must be one of {BENCHMARKS}, got {benchmark!r}")
    if benchmark == "longbench" and task not in LONGBENCH_METRICS:
        raise ValueError(f"task must be one of {sorted(LONGBENCH_METRICS)}, got {task!r}")
    if isinstance(answers, str) or not answers:
        raise ValueError(f"answers must be a list of at least one text, got {answers!r}")
    if benchmark == "ruler":
        return 100 * _ruler(task, prediction, answers)
    return 100 * _longbench(task, prediction, answers, all_classes or [])


def _ruler(task: str, prediction: str, answers: list[str]) -> float:
    text = re.sub(r"[\x00-\x1f]", "", prediction.strip()).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(found)


def _longbench(task: str, prediction: str, answers: list[str], all_classes: list[str]) -> float:
    prediction = prediction.lstrip()
    if task in FIRST_LINE_TASKS:
        prediction = prediction.split("\n")[0]
    metric = LONGBENCH_METRICS[task]
    return max(metric(prediction, answer, all_classes) for answer in answers)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _f1(prediction: str, answer: str, _: list[str]) -> float:
    """F1 over words."""
    predicted, wanted = _words(prediction), _words(answer)
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def _rouge_l(prediction: str, answer: str, _: list[str]) -> float:
    try:
        scores: Any = Rouge(metrics=["rouge-l"]).get_scores(prediction, answer, avg=True)
    except (ValueError, RecursionError):  # no words, or more than the library can align; 0 in kvpress too
        return 0.0
    return scores["rouge-l"]["f"]


def _number_share(prediction: str, wanted: str) -> float:
    """Share of the prediction's numbers that are the wanted one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _count(prediction: str, answer: str, _: list[str]) -> float:
    return _number_share(prediction, answer)


def _retrieval(prediction: str, answer: str, _: list[str]) -> float:
    return _number_share(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


def _code(prediction: str, answer: str, _: list[str]) -> float:
    """Edit similarity of the first line that is neither a comment nor markup, in whole per cent."""
    lines = (line for line in prediction.split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    line = next(lines, "")
    if line != answer and not (line and answer):
        return 0.0
    return round(fuzz.ratio(line, answer)) / 100


def _classification(prediction: str, answer: str, all_classes: list[str]) -> float:
    """One over the number of classes that the prediction names, if the answer is among them.

    Class names that are part of the answer do not count against it. kvpress removes them from the list that it is
    walking through, so the name behind a removed one is passed over and stays; repeated here.
    """
    named = [name for name in all_classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if answer in named else 0.0


Metric = Callable[[str, str, list[str]], float]
LONGBENCH_METRICS: dict[str, Metric] = {
    "narrativeqa": _f1,
    "qasper": _f1,
    "multifieldqa_en": _f1,
    "hotpotqa": _f1,
    "2wikimqa": _f1,
    "musique": _f1,
    "gov_report": _rouge_l,
    "qmsum": _rouge_l,
    "multi_news": _rouge_l,
    "trec": _classification,
    "triviaqa": _f1,
    "samsum": _rouge_l,
    "passage_count": _count,
    "passage_retrieval_en": _retrieval,
    "lcc": _code,
    "repobench-p": _code,
}
