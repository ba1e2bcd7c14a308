"""The benchmarks' tasks by name, and where their data is."""

from typing import get_args

from kvpress_prob.records import Benchmark

BENCHMARKS: tuple[Benchmark, ...] = get_args(Benchmark)
TASKS: dict[Benchmark, tuple[str, ...]] = {
    "ruler": (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    ),
    "longbench": (
        "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum",
        "multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
    ),
}  # fmt: skip
HUB: dict[Benchmark, str] = {"ruler": "simonjegou/ruler", "longbench": "Xnhyacinth/LongBench"}
"""kvpress' datasets."""
ANSWERS: dict[Benchmark, str] = {"ruler": "answer", "longbench": "answers"}
"""The column of the accepted answers."""
COLUMNS = ("context", "question", "answer_prefix", "task", "max_new_tokens")
"""The other columns of kvpress' schema."""
