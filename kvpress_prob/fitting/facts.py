"""Facts that a question could ask for: names, values, and the sentences that hold them, of many forms."""

import random
import string
import uuid
from collections.abc import Callable
from functools import cache
from itertools import pairwise

from kvpress_prob.extras import extra

with extra("eval", "The default texts of a fit"):
    from wonderwords import Defaults, RandomWord, filter_profanity

FIRST = (
    "Anna", "Omar", "Li", "Grace", "Ivan", "Noor", "Pedro", "Yuki", "Amara", "Lars", "Chiara", "Tom", "Zeynep",
    "Kofi", "Elena", "Raj", "Mei", "Jonas", "Fatima", "Hugo", "Sofia", "Dmitri", "Aisha", "Ben",
)  # fmt: skip
LAST = (
    "Okafor", "Lindqvist", "Tanaka", "Moreau", "Petrov", "Haddad", "Silva", "Novak", "O'Brien", "Castillo", "Weber",
    "Iyer", "Nakamura", "Schmidt", "Mensah", "Rossi", "Kowalski", "Ahmed", "Larsen", "Vargas", "Dubois", "Fischer",
    "Singh", "Brown",
)  # fmt: skip
STREETS = (
    "Elm Street",
    "Harbour Road",
    "Mill Lane",
    "Station Square",
    "Rue des Lilas",
    "Kirchgasse",
    "Via Roma",
    "Canal Walk",
)
FORMS = (
    "The {attribute} of {name} is {value}.",
    "{name}: {attribute} {value}.",
    "Note that {name} has the {attribute} {value}.",
    "For {name}, use {value} as the {attribute}.",
    "{value} is the {attribute} that belongs to {name}.",
    "The {attribute} for the {thing} was changed to {value} on {date}.",
    "On {date} at {clock}, {name} wrote down {value} next to the {thing}.",
    "{name} lives at {address}; the {attribute} is {value}.",
    "If you see {name}, say that the {thing} costs {money}.",
    "Please remember: {thing}, {attribute}, {value}.",
    "The {thing} is kept in {place}, and {name} has the {attribute} {value}.",
    "{name} was born on {date} in {place}.",
    "Item {number} ({thing}) was shipped to {name}, reference {code}.",
    "Whoever asks for the {thing} must give the word \"{word}\".",
    "The password of the {thing} is {code}.",
    "Call {name} under {phone} or write to {mail}.",
    "There were {number} {thing}s in {place} on {date}.",
    "A number worth keeping: {number}, for {key}.",
    "{key} has been assigned {value}.",
    "The value stored under {key} equals {value}.",
    "{key} -> {value}",
    "Register {key} with identifier {identifier}.",
    "The winner of the {place} {thing} was {name} with {number} points.",
    "({attribute} of {key}: {value})",
)  # fmt: skip
ATTRIBUTES = (
    "account number", "badge", "room", "code", "access code", "extension", "serial number", "licence plate",
    "favourite colour", "middle name", "locker", "ticket", "balance", "height", "phone number", "key", "deadline",
    "score", "seat", "passport number", "order number", "invoice", "nickname", "postcode",
)  # fmt: skip


def words(kind: Defaults) -> list[str]:
    """wonderwords' single, inoffensive words of a kind."""
    return list(_words(kind))


@cache
def _words(kind: Defaults) -> tuple[str, ...]:
    found = filter_profanity(RandomWord(enhanced_prefixes=False, words=kind).filter(exclude_with_spaces=True))
    return tuple(it for it in found if it.isalpha())


def word(rng: random.Random) -> str:
    """A noun."""
    return rng.choice(_words(Defaults.NOUNS))


def thing(rng: random.Random) -> str:
    """An adjective and a noun."""
    return f"{rng.choice(_words(Defaults.ADJECTIVES))} {word(rng)}"


def key(rng: random.Random) -> str:
    """A key of one of several forms: ``blue-otter``, ``blue_otter``, ``blueOtter``, ``BLUE.OTTER``, ``otter_17``."""
    first, second = rng.choice(_words(Defaults.ADJECTIVES)), word(rng)
    return rng.choice(
        (
            f"{first}-{second}", f"{first}_{second}", f"{first}{second.capitalize()}", f"{first}.{second}".upper(),
            f"{second}_{rng.randrange(100)}", f"{first} {second}",
        )
    )  # fmt: skip


def person(rng: random.Random) -> str:
    """A name of one of several forms."""
    first, last = rng.choice(FIRST), rng.choice(LAST)
    return rng.choice(
        (f"{first} {last}", first, f"{first[0]}. {last}", f"{last}, {first}", f"Dr {last}", f"{first}_{last}".lower())
    )


def number(rng: random.Random) -> str:
    """Of 2 to 10 digits, sometimes grouped or with decimals."""
    n = rng.randrange(10 ** rng.randint(1, 9), 10**10) % 10 ** rng.randint(2, 10)
    return rng.choice((str(n), str(n), str(n), f"{n:,}", f"{n / 100:.2f}"))


def code(rng: random.Random) -> str:
    """Letters and digits in groups."""
    letters = rng.choice((string.ascii_uppercase + string.digits, string.hexdigits.lower(), string.ascii_lowercase))
    groups = ["".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(rng.randint(1, 4))]
    return rng.choice(("-", "", "/", ":")).join(groups)


def identifier(rng: random.Random) -> str:
    """A UUID, or a part of one."""
    full = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return rng.choice((full, full, full[:13], full.replace("-", "")[: rng.randint(8, 32)]))


def coined(rng: random.Random) -> str:
    """A word that does not exist."""
    return "".join(rng.choice("bcdfghjklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))


def date(rng: random.Random) -> str:
    year, month, day = rng.randrange(1900, 2100), rng.randint(1, 12), rng.randint(1, 28)
    names = ("January", "March", "April", "May", "June", "August", "October", "December")
    return rng.choice((f"{year}-{month:02}-{day:02}", f"{day} {rng.choice(names)} {year}", f"{month}/{day}/{year}"))


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def address(rng: random.Random) -> str:
    return f"{rng.randint(1, 199)} {rng.choice(STREETS)}, {rng.randrange(10000, 99999)} {place(rng)}"


def place(rng: random.Random) -> str:
    return f"{rng.choice(('North', 'Old', 'Port', 'Upper', 'Saint'))} {coined(rng).capitalize()}"


def phone(rng: random.Random) -> str:
    return f"+{rng.randint(1, 99)} {rng.randrange(100, 999)} {rng.randrange(10**6, 10**7)}"


def mail(rng: random.Random) -> str:
    return f"{coined(rng)}.{rng.choice(LAST).lower()}@{coined(rng)}.{rng.choice(('org', 'net', 'example'))}"


def money(rng: random.Random) -> str:
    return rng.choice(("${}", "{} euros", "£{}", "{} crowns")).format(number(rng))


def network(rng: random.Random) -> str:
    return ".".join(str(rng.randrange(256)) for _ in range(4))


VALUES: tuple[Callable[[random.Random], str], ...] = (
    number, number, number, code, code, identifier, coined, date, phone, mail, money, network, word, thing, person,
)  # fmt: skip


def value(rng: random.Random) -> str:
    """A value of any kind."""
    return rng.choice(VALUES)(rng)


_PARTS: dict[str, Callable[[random.Random], str]] = {
    "attribute": lambda rng: rng.choice(ATTRIBUTES), "name": person, "value": value, "thing": thing, "date": date,
    "clock": clock, "address": address, "money": money, "place": place, "number": number, "code": code, "word": word,
    "phone": phone, "mail": mail, "key": key, "identifier": identifier,
}  # fmt: skip


def filled(rng: random.Random, form: str) -> str:
    """A form with everything filled in."""
    wanted = [name for _, name, _, _ in string.Formatter().parse(form) if name]
    return form.format(**{name: _PARTS[name](rng) for name in wanted})


def sentences(rng: random.Random, n: int) -> list[str]:
    """``n`` facts; sometimes several about one name, and sometimes one name with several values."""
    facts: list[str] = []
    while len(facts) < n:
        form = rng.choice(FORMS)
        facts.append(filled(rng, form))
        if rng.random() < 0.3:
            state = rng.getstate()
            subject = key(rng)
            rng.setstate(state)
            facts += [f"The {rng.choice(ATTRIBUTES)} of {subject} is {value(rng)}." for _ in range(rng.randint(2, 4))]
    return facts[:n]


def assignments(rng: random.Random, n: int) -> list[str]:
    """Constants, and a chain in which each is set from the one before."""
    lines = []
    for _ in range(n):
        name = key(rng).translate(str.maketrans("- .", "___"))
        lines.append(f"{name} = {number(rng) if rng.random() < 0.5 else repr(value(rng))}")
    chain = [f"{coined(rng)}_{rng.randrange(100)}" for _ in range(rng.randint(2, 6))]
    lines.append(f"{chain[0]} = {number(rng)}")
    return lines + [f"{name} = {before}" for before, name in pairwise(chain)]


def nonsense(rng: random.Random) -> str:
    """A sentence of random words."""
    verb = rng.choice(_words(Defaults.VERBS))
    return rng.choice(
        ("A {} may {} some {}.", "Every {} can {} a {}.", "Some {} did {} no {}.", "Our {} should {} one {}.")
    ).format(thing(rng), verb, thing(rng))
