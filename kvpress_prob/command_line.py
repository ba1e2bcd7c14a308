"""From words on the command line to a call of a subcommand's function.

A subcommand is a function: its signature gives the options, its docstring the help. A first parameter called ``config``
is a dataclass, read from a YAML file: ``kvpress-prob COMMAND FILE --FIELD VALUE``, where the command line wins over the
file and the file over defaults. A parameter called ``arguments`` takes what follows ``--``. An option that is a list
takes words: ``--ratios 0.2 0.5``, and may be given several times.
"""

import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import yaml

from kvpress_prob.extras import extra
from kvpress_prob.values import is_number

with extra("cli", "The command line"):
    from jsonargparse import ArgumentParser

Commands = dict[str, Callable[..., None]]


def parse(commands: Commands, argv: list[str], version: str) -> tuple[Callable[..., None], dict[str, Any]]:
    """The chosen function and its arguments; raises ``ArgumentError`` for what does not fit its signature."""
    place = argv.index("--") if "--" in argv else len(argv)
    argv, arguments = argv[:place], argv[place + 1 :]
    parser = ArgumentParser(
        prog="kvpress-prob",
        version=version,
        exit_on_error=False,
        description="Probabilistic KV-cache eviction: evaluation and demo. 'kvpress-prob COMMAND --help' tells more.",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    subcommands = parser.add_subcommands(dest="command")
    for name, function in commands.items():
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        sub = ArgumentParser(exit_on_error=False, description=summary)
        sub.add_function_arguments(function, as_group=False, as_positional=True, skip={"arguments"})
        subcommands.add_subcommand(name, sub, help=summary)
    words = _spelt_out(commands, argv)
    try:
        parsed = parser.instantiate(parser.parse_args(words))
    except OverflowError as error:
        place = next((place for place, word in enumerate(words) if _huge.search(word)), len(words))
        first = place if words[place : place + 1] and words[place].startswith("--") else max(place - 1, 0)
        given = " ".join(words[first : place + 1])
        raise ValueError(f"numbers of options must be ones that a float can hold, got {given}") from error
    command = commands[parsed.command]
    options = vars(parsed[parsed.command])
    takes = "arguments" in inspect.signature(command).parameters
    if arguments and not takes:
        raise ValueError(f"{parsed.command} takes nothing after --, got {arguments}")
    return command, {**options, "arguments": arguments} if takes else options


def _spelt_out(commands: Commands, argv: list[str]) -> list[str]:
    """The command line as the parser wants it: underscores in option names, lists as one word, and ``config`` before
    its fields.

    ``sweep FILE --max-context-tokens 9 --seeds 0 1`` becomes
    ``sweep --config FILE --config.max_context_tokens 9 --config.seeds=[0, 1]``.
    """
    place = next((place for place, word in enumerate(argv) if word in commands), len(argv))
    head, tail = argv[: place + 1], argv[place + 1 :]
    if place == len(argv):
        return head
    hints = get_type_hints(commands[argv[place]])
    config = hints.get("config")
    names = [] if config is None else [field.name for field in fields(config)]
    if config is not None:
        if tail and not tail[0].startswith("-"):
            _check_file(Path(tail[0]), names)
            tail = ["--config", *tail]
        else:
            for file in _config_files(tail):
                _check_file(file, names)
        hints |= get_type_hints(config)
    lists = {name: item for name, hint in hints.items() if (item := _item_type(hint)) is not None}
    tail = _lists_joined([_dashes.sub(lambda match: match[0].replace("-", "_"), word) for word in tail], lists)
    known = tuple(f"--{name}" for name in names)
    return head + [f"--config.{word[2:]}" if word.partition("=")[0] in known else word for word in tail]


_dashes = re.compile(r"(?<=^--)[^=]+")
_huge = re.compile(r"\d{309}")
_number = re.compile(r"-[\d.]")


def _item_type(hint: Any) -> Any:
    """What a list holds; None for what is no list, or is one or something else that words can be."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    options = [option for option in options if option is not type(None)]
    return get_args(options[0])[0] if len(options) == 1 and get_origin(options[0]) is list else None


def _lists_joined(words: list[str], lists: dict[str, Any]) -> list[str]:
    """``--name 1 2 --name 3`` as ``--name=[1, 2, 3]`` for every name of a list; ``--name [1, 2]`` stays one list."""
    left: list[str] = []
    values: dict[str, list[str]] = {}
    name = None
    for word in words:
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            name = option[2:] if option[2:] in lists else None
            if name is not None:
                values.setdefault(name, []).extend([value] if equals else [])
                continue
        elif name is not None and (not word.startswith("-") or _number.match(word)):
            values[name].append(word)
            continue
        left.append(word)
    return [*left, *(f"--{name}={_joined(given, lists[name])}" for name, given in values.items())]


def _joined(words: list[str], item: Any) -> str:
    if len(words) == 1 and words[0].startswith("["):
        return words[0]
    return json.dumps(words, ensure_ascii=False) if item in (str, Path) else f"[{', '.join(words)}]"


class _Loader(yaml.SafeLoader):
    """YAML whose mappings have every key once, and whose integers a float can hold."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = cast(yaml.MappingNode, super().compose_mapping_node(anchor))
        found = set[tuple[str, Any]]()
        for key, _ in node.value:
            if (key.tag, key.value) in found:
                message = f"keys must be different from each other, got {key.value!r} twice"
                raise yaml.MarkedYAMLError(problem=message, problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                found.add((key.tag, key.value))
        return node


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    try:
        value = loader.construct_yaml_int(node)
    except ValueError:  # more digits than Python reads
        value = None
    if not is_number(value):
        message = f"numbers must be ones that a float can hold, got {node.value!r}"
        raise yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)
    return cast(int, value)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _config_files(words: list[str]) -> list[Path]:
    """Files that are given as ``--config FILE`` or ``--config=FILE``."""
    after = [value for word, value in pairwise(words) if word == "--config"]
    joined = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    return [Path(value) for value in after + joined if os.path.isfile(value)]


def _check_file(path: Path, names: list[str]) -> None:
    """``ValueError`` unless the file is a YAML mapping of the given names."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"config must be a YAML file, got '{path}': {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"config must be a YAML file of keys and values, got '{path}'")
    for key in values:
        if key not in names:
            raise ValueError(f"keys of '{path}' must be among {names}, got {key!r}")
