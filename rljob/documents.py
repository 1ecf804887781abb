"""YAML that a person wrote, as plain values; what the parser crashes on, or takes half of, is refused with a sentence.

Called by manifest.py, for files and for --set, and by plan.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlinf_api import storable
from rlinf_api.errors import InvalidManifest

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def of_file(file: Path, *, what: str) -> list[Any]:
    """The documents of a file, or of standard input for `-`. InvalidManifest, beginning with `what`, where it holds
    none."""
    try:
        if str(file) == "-" and sys.stdin is None:  # as Python leaves it where the shell said <&-
            raise OSError("standard input is closed")
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "name a file, or pipe one in" if str(file) == "-" else "check the path"
        raise InvalidManifest(f"{what} cannot be read", got=str(error), next=remedy) from error
    try:
        return read(text, what=what)
    except (yaml.YAMLError, ValueError) as error:
        where, part = " ".join(str(error).split()), "line" if isinstance(error, yaml.YAMLError) else "value"
        raise InvalidManifest(f"{what} is not YAML", got=where, next=f"correct that {part}") from error


def read(text: str, *, what: str) -> list[Any]:
    """The documents of a text that are not empty, each place with a value of its own: an alias is a way to write, and
    who changes one place means no other. Raises yaml.YAMLError or ValueError where it is no YAML, and
    InvalidManifest, beginning with `what`, where it is one that no API server takes."""
    _check_depth(text, what=what)
    loader, found = Loader(text), []
    try:
        while loader.check_node():
            node = loader.get_node()
            _check_keys(node, what=what)
            found.append(loader.construct_document(node))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    finally:
        loader.dispose()
    if problems := [str(p) for document in found for p in storable.problems(document, "")]:
        raise InvalidManifest(f"{what}: {'; '.join(problems)}")
    return [_unshared(document) for document in found if document is not None]


def _unshared(value: Any) -> Any:
    """`storable` has looked at it: no circle, no more than an API server takes with all aliases written out."""
    if isinstance(value, dict):
        return {key: _unshared(child) for key, child in value.items()}
    return [_unshared(child) for child in value] if isinstance(value, list) else value


def _check_depth(text: str, *, what: str) -> None:
    """Event by event: the C parser puts nodes together by recursion and overruns its stack at some ten thousand."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > storable.MAX_DEPTH:
            got = f"more than {storable.MAX_DEPTH} levels, at line {event.start_mark.line + 1}"
            raise InvalidManifest(f"{what} is nested too deeply", got=got, next="write it flatter")


def _check_keys(node: yaml.Node, *, what: str) -> None:
    """A parser takes the last of two equal keys; a person who wrote both meant something else. What `<<` brings in may
    be overridden: these are other nodes."""
    for mapping in _mappings(node, set()):
        seen: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in seen:
                raise InvalidManifest(
                    f"{what} has key {key.value!r} twice", got=f"line {seen[name]} and line {line}",
                    wanted="each key once", next="remove one of them",
                )  # fmt: skip
            seen[name] = line


def _mappings(node: yaml.Node, seen: set[int]) -> Iterator[yaml.MappingNode]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield node
        for key, value in node.value:
            yield from _mappings(key, seen)
            yield from _mappings(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _mappings(child, seen)
