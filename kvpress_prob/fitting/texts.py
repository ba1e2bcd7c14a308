"""Texts to fit a surrogate on when none are given: no download, any number, every one another.

What a surrogate learns is what the texts' reconstructions look up, so variety decides more than amount. Four domains
take turns; each text follows from the seed and its number alone.

    prose        chapters of Python's reference (``pydoc_data``), every other one with planted facts
    code         modules of the standard library, every other one with constants and a chain of assignments
    dialogue     people who tell each other facts between small talk
    key_value    tables, records, logs, configurations and lists, or facts in repeated filler

Facts are sentences of many forms about names of many forms, with numbers, codes, dates, addresses and words as values
(``facts``). None has the wording of RULER's or of ``examples.generator``, which surrogates are measured with.
"""

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from kvpress_prob.fitting import facts

Domain = Literal["prose", "code", "dialogue", "key_value"]
DOMAINS: tuple[Domain, ...] = ("prose", "code", "dialogue", "key_value")
CHAPTERS = (
    "assert", "async", "attribute-access", "augassign", "binary", "bltin-null-object", "booleans", "calls", "class",
    "context-managers", "continue", "conversions", "customization", "del", "dict", "dynamic-features", "exceptions",
    "execmodel", "exprlists", "floating", "for", "function", "global", "id-classes", "identifiers", "if", "imaginary",
    "import", "in", "integers", "lambda", "lists", "naming", "nonlocal", "numbers", "numeric-types", "objects",
    "operator-summary", "pass", "power", "raise", "return", "sequence-types", "shifting", "slicings", "strings",
    "subscriptions", "truth", "try", "typesfunctions", "typesmethods", "typesmodules", "typesseq-mutable", "unary",
    "while", "with", "yield",
)  # fmt: skip
"""Chapters of Python's reference. The ones that ``benchmarks.text_fidelity`` reads are not among them."""
MODULES = (
    "argparse", "ast", "bisect", "calendar", "cmd", "codeop", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "difflib", "dis", "filecmp", "fnmatch", "fractions", "ftplib", "functools", "glob", "gzip",
    "heapq", "imaplib", "ipaddress", "linecache", "mailbox", "netrc", "nntplib", "operator", "optparse", "pprint",
    "queue", "random", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socketserver", "statistics",
    "string", "tarfile", "tempfile", "textwrap", "threading", "timeit", "trace", "types", "uuid", "wave", "weakref",
    "zipfile",
)  # fmt: skip
SMALL_TALK = (
    "How was the journey?", "Long, but the train was on time for once.", "Did you bring the papers?",
    "Yes, they are here.", "It has been raining since Monday.", "I know, the whole garden is under water.",
    "Shall we start?", "Give me a minute.", "That is not what I was told.", "Who told you?",
    "Let me write that down.", "Say it again, slowly.", "Thank you.", "Never mind, we still have time.",
    "I would rather wait until everybody is here.", "Have you eaten yet?", "Not since noon.",
    "The coffee is awful today.", "They changed the supplier.", "I will send you a message later.", "Please do.",
    "Are you sure?", "As sure as I can be.", "That makes sense.", "We should have asked earlier.",
    "Perhaps next year.", "My sister said the same.", "It depends on the weather.", "So what do we do now?",
    "Nothing, for the moment.",
)  # fmt: skip
FILLER = (
    "Rain fell all night.", "The shop was closed.", "Nobody answered the door.", "A dog barked twice.",
    "The clock had stopped.", "Bread was still warm.", "Two boats left the harbour.", "The light changed slowly.",
    "He put the letter away.", "She counted the steps.", "Snow covered the road.", "The kettle began to sing.",
    "They waited by the gate.", "Somebody laughed upstairs.", "The river was low.", "Birds sat on the wire.",
)  # fmt: skip


def default_texts(n: int, seed: int = 0) -> Iterator[tuple[Domain, str]]:
    """``n`` texts with their domains, the domains in turn; text ``i`` is the same whatever ``n`` is."""
    for i in range(n):
        domain = DOMAINS[i % len(DOMAINS)]
        yield domain, text_of(domain, i // len(DOMAINS), seed)


def text_of(domain: Domain, number: int, seed: int = 0) -> str:
    """One text of a domain, of 6,000 characters or more."""
    if domain not in _MAKERS:
        raise ValueError(f"domain must be one of {DOMAINS}, got {domain!r}")
    return _MAKERS[domain](random.Random(f"{seed} {domain} {number}"), number)


def _prose(rng: random.Random, number: int) -> str:
    names = sorted(name for name in CHAPTERS if name in topics)
    text = _long_enough(rng, lambda: topics[rng.choice(names)])
    begin = rng.randrange(max(len(text) - 8000, 0) // 4 + 1)
    lines = text[begin:].splitlines()
    return _planted(rng, lines, facts.sentences(rng, rng.randint(4, 24))) if number % 2 == 0 else "\n".join(lines)


def _code(rng: random.Random, number: int) -> str:
    lines = _long_enough(rng, lambda: _source(rng.choice(MODULES))).splitlines()
    begin = rng.randrange(len(lines) // 2)
    return (
        _planted(rng, lines[begin:], facts.assignments(rng, rng.randint(6, 20)))
        if number % 2 == 0
        else "\n".join(lines[begin:])
    )


@cache
def _source(module: str) -> str:
    """A module's source; empty where this Python lacks it."""
    spec = importlib.util.find_spec(module)
    origin = Path(spec.origin) if spec and spec.has_location and spec.origin else None
    return origin.read_text(encoding="utf-8") if origin and origin.suffix == ".py" else ""


def _dialogue(rng: random.Random, number: int) -> str:
    speakers = [facts.person(rng) for _ in range(rng.randint(2, 4))]
    form = rng.choice(("{}: {}", "- {}: {}", "[{}] {}", "<{}> {}", '{} said: "{}"'))
    told = facts.sentences(rng, 60)
    lines = []
    while sum(map(len, lines)) < 6000:
        words = rng.choice(SMALL_TALK)
        if told and rng.random() < 0.4:
            words = f"{words} {told.pop()}" if rng.random() < 0.5 else told.pop()
        lines.append(form.format(rng.choice(speakers), words))
    return "\n".join(lines)


def _key_value(rng: random.Random, number: int) -> str:
    form = _FORMS[number % len(_FORMS)]
    parts = [form(rng)]
    while sum(map(len, parts)) < 6000:
        parts.append(rng.choice((form, form, rng.choice(_FORMS)))(rng))
    return "\n\n".join(parts)


def _records(rng: random.Random) -> str:
    columns = _columns(rng)
    rows = [{name: make(rng) for name, make in columns} for _ in range(rng.randint(8, 20))]
    return json.dumps(rows, indent=rng.choice((None, 1, 2)))


def _table(rng: random.Random) -> str:
    columns = _columns(rng)
    separator = rng.choice((",", ";", "\t", " | "))
    rows = [[name for name, _ in columns]] + [[make(rng) for _, make in columns] for _ in range(rng.randint(10, 30))]
    return "\n".join(separator.join(row) for row in rows)


def _settings(rng: random.Random) -> str:
    form = rng.choice(("{} = {}", "{}: {}", "{}={}", '"{}": "{}",', "export {}={}", "<{0}>{1}</{0}>"))
    lines = []
    for _ in range(rng.randint(2, 6)):
        lines.append(f"[{facts.word(rng)}]")
        lines += [form.format(facts.key(rng), facts.value(rng)) for _ in range(rng.randint(3, 10))]
    return "\n".join(lines)


def _log(rng: random.Random) -> str:
    levels = ("INFO", "DEBUG", "WARNING", "ERROR")
    lines = []
    for _ in range(rng.randint(15, 40)):
        said = f"{facts.key(rng)}: {facts.word(rng)}={facts.value(rng)}"
        lines.append(f"{facts.date(rng)} {facts.clock(rng)} {rng.choice(levels)} {said}")
    return "\n".join(lines)


def _list(rng: random.Random) -> str:
    """Numbered words or identifiers, some of them several times."""
    make = rng.choice((facts.word, facts.identifier, facts.coined, facts.person))
    entries = [make(rng) for _ in range(rng.randint(40, 120))]
    entries += rng.choices(entries[:10], k=rng.randint(10, 60))
    rng.shuffle(entries)
    form = rng.choice(("{0}. {1}", "{0}) {1}", "- {1}", "#{0} {1}", "{1}"))
    return rng.choice((" ", "\n", ", ")).join(form.format(place, entry) for place, entry in enumerate(entries, 1))


def _pairs(rng: random.Random) -> str:
    """A line a fact, all of one form, so that the key alone tells them apart."""
    form = rng.choice(facts.FORMS)
    return "\n".join(facts.filled(rng, form) for _ in range(rng.randint(15, 40)))


def _repeated(rng: random.Random) -> str:
    """Facts in filler that repeats itself, or in sentences of random words."""
    if rng.random() < 0.5:
        line = " ".join(rng.sample(FILLER, rng.randint(3, 6)))
        lines = [line] * rng.randint(40, 80)
    else:
        lines = [facts.nonsense(rng) for _ in range(rng.randint(80, 140))]
    return _planted(rng, lines, facts.sentences(rng, rng.randint(1, 10)))


def _columns(rng: random.Random) -> list[tuple[str, Callable[[random.Random], str]]]:
    """Names and makers of a table's columns; the first is the key."""
    makers = rng.sample(facts.VALUES, rng.randint(2, 5))
    return [
        (facts.word(rng), rng.choice((facts.person, facts.identifier, facts.key))),
        *((facts.word(rng), it) for it in makers),
    ]


_FORMS = (_repeated, _records, _pairs, _table, _repeated, _settings, _log, _list)
_MAKERS: dict[str, Callable[[random.Random, int], str]] = {
    "prose": _prose, "code": _code, "dialogue": _dialogue, "key_value": _key_value,
}  # fmt: skip


def _long_enough(rng: random.Random, make: Callable[[], str]) -> str:
    """Several texts, one after the other, until there is enough."""
    text = make()
    while len(text) < 10_000:
        text += "\n" + make()
    return text


def _planted(rng: random.Random, lines: list[str], facts_: list[str]) -> str:
    """Lines with facts between them, most of them where a window of 1,024 tokens sees them."""
    lines = list(lines)
    seen = next((place for place in range(len(lines)) if sum(map(len, lines[:place])) > 4500), len(lines))
    for fact in facts_:
        lines.insert(rng.randrange(seen + 1), fact)
    return "\n".join(lines)
