"""Texts to fit on: any number, the same every time, and nothing that surrogates are measured with."""

import re

import pytest

from benchmarks.running import CHAPTERS as MEASURED
from kvpress_prob.examples import generator
from kvpress_prob.fitting.texts import CHAPTERS, DOMAINS, default_texts, text_of


def test_texts_follow_from_seed_and_number():
    first = list(default_texts(16))
    assert list(default_texts(8)) == first[:8]
    assert [domain for domain, _ in first] == list(DOMAINS) * 4
    assert len({text for _, text in first}) == 16
    assert all(one != other for (_, one), (_, other) in zip(first, default_texts(16, seed=1), strict=True))
    assert all(len(text) >= 6000 for _, text in first)


def test_measured_chapters_and_wordings_are_not_among_them():
    assert not set(CHAPTERS) & set(MEASURED)
    texts = "\n".join(text for _, text in default_texts(200))
    for phrase in ("special magic", "grass is green", "sky is blue", "\nVAR ", "coded text", "hidden in the following"):
        assert phrase not in texts
    assert re.sub(r"\{\w+\}", "", generator.NEEDLE) not in texts


def test_facts_have_many_forms():
    texts = "\n".join(text for _, text in default_texts(200))
    for pattern in (
        r"\b\d{7,}\b", r"[0-9a-f]{8}-[0-9a-f]{4}-4", r"[A-Z0-9]{3,}-[A-Z0-9]{3,}", r"\d{4}-\d\d-\d\d",
        r"@\w+\.(org|net)", r"\+\d+ \d{3} \d{7}", r'"\w+": "', r"\w+,\w+",
        r"^\w+_\d+ = \w+_\d+$", r"is the [\w ]+ that belongs to",
    ):  # fmt: skip
        assert re.search(pattern, texts, re.MULTILINE), pattern


def test_an_unknown_domain_is_refused():
    with pytest.raises(ValueError, match="domain must be one of"):
        text_of("poetry", 0)  # pyright: ignore[reportArgumentType]
