"""Offline examples in RULER's manner (https://arxiv.org/abs/2404.06654): no download, any length, any number.

The tasks have RULER's names and forms, but words come from wonderwords and long texts from its word lists instead of
essays, so scores are not comparable to published RULER scores. Everything follows from the seed; example ``i`` of a
task is the same whatever the number of examples and whichever other tasks are generated.
"""

import random
import string
from collections.abc import Callable
from functools import cache
from itertools import pairwise

from kvpress_prob.extras import extra
from kvpress_prob.records import Example

with extra("eval", "Generating examples"):
    from wonderwords import Defaults, RandomWord, filter_profanity

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
Parts = tuple[str, str, str, list[str]]
"""Context, question, answer prefix and answers."""


@cache
def _words(kind: Defaults) -> list[str]:
    words = filter_profanity(RandomWord(enhanced_prefixes=False, words=kind).filter(exclude_with_spaces=True))
    return [word for word in words if word.isalpha()]


def _sentence(rng: random.Random) -> str:
    adjective, noun, verb, thing = (
        rng.choice(_words(kind)) for kind in (Defaults.ADJECTIVES, Defaults.NOUNS, Defaults.VERBS, Defaults.NOUNS)
    )
    return f"The {adjective} {noun} will {verb} the {thing}."


def _keys(rng: random.Random, n: int) -> list[str]:
    """Distinct adjective-noun pairs."""
    keys: dict[str, None] = {}
    while len(keys) < n:
        keys[f"{rng.choice(_words(Defaults.ADJECTIVES))}-{rng.choice(_words(Defaults.NOUNS))}"] = None
    return list(keys)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _hide(rng: random.Random, needles: list[str], haystack: list[str]) -> str:
    """The haystack's lines with needles at random places, in the needles' order."""
    lines = list(haystack)
    for place, needle in sorted(
        zip(sorted(rng.choices(range(len(lines) + 1), k=len(needles))), needles, strict=True), key=lambda pair: -pair[0]
    ):
        lines.insert(place, needle)
    return "\n".join(lines)


def _needles(rng: random.Random, haystack: list[str], *, keys: int = 1, values: int = 1, queries: int = 1) -> Parts:
    """``keys`` keys with ``values`` numbers each, ``queries`` of the keys asked for."""
    names = _keys(rng, keys)
    numbers = {name: [_number(rng) for _ in range(values)] for name in names}
    needles = [NEEDLE.format(key=name, value=value) for name in names for value in numbers[name]]
    rng.shuffle(needles)
    asked = rng.sample(names, queries)
    answers = [value for name in asked for value in numbers[name]]
    many = len(answers) > 1
    what = asked[0] if queries == 1 else ", ".join(asked[:-1]) + " and " + asked[-1]
    text = (
        f"{'Some special magic numbers are' if many else 'A special magic number is'} hidden in the following text. "
        f"Remember {'them' if many else 'it'}: a question about {'them' if many else 'it'} will follow.\n"
        f"{_hide(rng, needles, haystack)}\n"
    )
    number = f"special magic number{'s' if many else ''} for {what} mentioned in the text"
    verb = "are" if many else "is"
    return text, f"What {'are all' if many else 'is'} the {number}? ", f"The {number} {verb}", answers


def _single_noise(rng: random.Random, size: int) -> Parts:
    return _needles(rng, [NOISE] * size)


def _single_text(rng: random.Random, size: int) -> Parts:
    return _needles(rng, [_sentence(rng) for _ in range(size)])


def _multikey(rng: random.Random, size: int) -> Parts:
    return _needles(rng, [_sentence(rng) for _ in range(size)], keys=4)


def _multikey_lines(rng: random.Random, size: int) -> Parts:
    """A haystack of nothing but needles."""
    return _needles(rng, [], keys=size + 1)


def _multivalue(rng: random.Random, size: int) -> Parts:
    return _needles(rng, [_sentence(rng) for _ in range(size)], values=4)


def _multiquery(rng: random.Random, size: int) -> Parts:
    return _needles(rng, [_sentence(rng) for _ in range(size)], keys=4, queries=4)


def _variable_tracking(rng: random.Random, size: int) -> Parts:
    """A chain of assignments, hidden in noise."""
    names: dict[str, None] = {}
    while len(names) < 5:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    chain, value = list(names), str(rng.randrange(10**4, 10**5))
    assignments = [f"VAR {chain[0]} = {value}"] + [f"VAR {name} = VAR {before}" for before, name in pairwise(chain)]
    text = (
        "Follow the chain of variable assignments hidden in the following text.\n\n"
        f"{_hide(rng, assignments, [NOISE] * size)}\n"
    )
    return (
        text,
        f"Question: Find all variables that are assigned the value {value} in the text above. ",
        f"Answer: {len(chain)} variables are assigned the value {value}, they are: ",
        chain,
    )


def _common_words(rng: random.Random, size: int) -> Parts:
    """Ten words six times each among ``size`` that come once."""
    nouns = _words(Defaults.NOUNS)
    if size > len(nouns) - 10:
        raise ValueError(f"length must leave room for at most {len(nouns)} different words in cwe, got room for more")
    words = rng.sample(nouns, 10 + size)
    listed = words[:10] * 6 + words[10:]
    rng.shuffle(listed)
    numbered = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
    return (
        f"Below is a numbered list of words. Some of them appear more often than others. Remember those.\n{numbered}\n",
        "Question: What are the 10 most common words in the above list? ",
        "Answer: The 10 words that appear most often in the list are:",
        words[:10],
    )


def _frequent_words(rng: random.Random, size: int) -> Parts:
    """Coded words whose frequency falls with the square of their rank."""
    names: dict[str, None] = {}
    while len(names) < 20:
        names["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    coded = list(names)
    # The added part keeps the three answers strictly ahead of the rest at any size.
    listed = [word for rank, word in enumerate(coded, 1) for _ in range(size // (2 * rank**2) + max(5 - rank, 1))]
    rng.shuffle(listed)
    return (
        "Read the following coded text and count how often each coded word appears.\n" + " ".join(listed) + "\n",
        "Question: What are the three most frequent words in the above coded text? ",
        "Answer: The three most frequent words are:",
        coded[:3],
    )


MAKERS: dict[str, tuple[Callable[[random.Random, int], Parts], int]] = {
    "niah_single_1": (_single_noise, 128),
    "niah_single_2": (_single_text, 128),
    "niah_multikey_1": (_multikey, 128),
    "niah_multikey_2": (_multikey_lines, 128),
    "niah_multivalue": (_multivalue, 128),
    "niah_multiquery": (_multiquery, 128),
    "vt": (_variable_tracking, 30),
    "cwe": (_common_words, 120),
    "fwe": (_frequent_words, 50),
}
"""Maker and ``max_new_tokens`` of every task."""


def generate_examples(
    task: str, n: int, length: int, count_tokens: Callable[[str], int], seed: int = 0
) -> list[Example]:
    """The first ``n`` examples of a task, each as long as fits.

    Parameters
    ----------
    task : str
        A key of ``MAKERS``.
    n : int
    length : int
        Most tokens of context, question, answer prefix and ``max_new_tokens`` together.
    count_tokens : callable
        Number of tokens of a text.
    seed : int

    Raises
    ------
    ValueError
        For an unknown task, or a length into which the task does not fit.
    """
    if task not in MAKERS:
        raise ValueError(f"task must be one of {sorted(MAKERS)}, got {task!r}")
    make, max_new_tokens = MAKERS[task]
    examples = []
    for i in range(n):

        def parts(size: int, i: int = i) -> Parts:
            return make(random.Random(f"{seed} {task} {i}"), size)

        def fits(size: int, parts: Callable[[int], Parts] = parts) -> bool:
            return count_tokens("".join(parts(size)[:3])) + max_new_tokens <= length

        if not fits(0):
            raise ValueError(f"length must be large enough for {task}, got {length} tokens")
        size = _largest(fits)
        context, question, answer_prefix, answers = parts(size)
        examples.append(
            Example(f"{task}/{i}", "ruler", task, context, question, answer_prefix, answers, max_new_tokens)
        )
    return examples


def _largest(fits: Callable[[int], bool]) -> int:
    """Largest size that fits, found by doubling and bisection; ``fits(0)`` holds."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
