"""The text form of selectors, for configurations, checkpoints and command lines: ``head(1) | (norm() & ~embed)``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from fedjax_pers.paths import BARE, Selector, as_selector, everything, nearest, nothing
from fedjax_pers.presets import (
    adapter,
    attention,
    bias,
    deep,
    depth,
    embedding,
    feed_forward,
    head,
    lora,
    norm,
    norm_statistics,
    shallow,
)

_BY_DEPTH = (head, depth, shallow, deep)
_BY_KIND = (norm, norm_statistics, embedding, attention, feed_forward, bias, adapter, lora)
_CALLS: dict[str, Callable[..., Selector]] = {maker.__name__: maker for maker in (*_BY_DEPTH, *_BY_KIND)} | {
    "regex": lambda pattern: as_selector(re.compile(pattern))
}
_CONSTANTS = {"nothing": nothing, "everything": everything}
_TOKEN = re.compile(rf"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<operator>[|&()~,=])|(?P<bare>{BARE}))""")


def parse(text: str) -> Selector:
    r"""The selector that prints as ``text``: ``parse(str(selector)) == selector`` for all but ``where(...)``.

    Globs stand for themselves, or in double quotes (JSON strings) where they hold blanks or operators. ``~`` binds
    tighter than ``&``, and ``&`` tighter than ``|``. Calls are the presets and ``regex("...")``.

    Example:
      >>> parse("head(2, by=block) | norm() & ~embed | regex(\"a.*/bias\")")
      Selector(head(2, by=block) | (norm() & ~embed) | regex("a.*/bias"))

    Raises:
      ValueError: the text does not read as a selector, or holds ``where(...)``, which no text can give back.
    """
    if not isinstance(text, str):
        raise ValueError(f"parse: found {text!r}; expected text")
    reader = _Reader(text)
    selector = reader.union()
    if reader.rest():
        raise reader.error("'|', '&' or the end")
    return selector


class _Word(NamedTuple):
    value: str
    quoted: bool

    def argument(self) -> int | str:
        return int(self.value) if not self.quoted and re.fullmatch(r"-?\d+", self.value) else self.value


class _Reader:
    """Recursive descent over a selector's text."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def union(self) -> Selector:
        selector = self.intersection()
        while self.take("|"):
            selector = selector | self.intersection()
        return selector

    def intersection(self) -> Selector:
        selector = self.single()
        while self.take("&"):
            selector = selector & self.single()
        return selector

    def single(self) -> Selector:
        if self.take("~"):
            return ~self.single()
        if self.take("("):
            selector = self.union()
            self.need(")")
            return selector
        word = self.word("a pattern, a preset, '~' or '('")
        if word.quoted:
            return as_selector(word.value)
        if self.take("("):
            return self.call(word.value)
        return _CONSTANTS.get(word.value) or as_selector(word.value)

    def call(self, name: str) -> Selector:
        if name not in _CALLS:
            close = nearest(name, _CALLS)
            raise ValueError(
                f"selector {self.text!r}: found the call {name}(...); there are {', '.join(_CALLS)}"
                + (f"; nearest: {close[0]}" if close else "")
            )
        positional: list[int | str] = []
        named: dict[str, int | str] = {}
        while not self.take(")"):
            word = self.word("an argument or ')'")
            if self.take("="):
                named[word.value] = self.word("a value").argument()
            else:
                positional.append(word.argument())
            if not self.take(","):
                self.need(")")
                break
        try:
            return _CALLS[name](*positional, **named)
        except (TypeError, re.error) as problem:
            raise ValueError(f"selector {self.text!r}: in {name}(...): {problem}") from None

    def take(self, operator: str) -> bool:
        token = _TOKEN.match(self.text, self.position)
        if token is None or token["operator"] != operator:
            return False
        self.position = token.end()
        return True

    def need(self, operator: str) -> None:
        if not self.take(operator):
            raise self.error(repr(operator))

    def word(self, expected: str) -> _Word:
        token = _TOKEN.match(self.text, self.position)
        if token is None or token["operator"]:
            raise self.error(expected)
        try:
            word = _Word(json.loads(token["quoted"]), True) if token["quoted"] else _Word(token["bare"], False)
        except json.JSONDecodeError as problem:
            raise self.error(f"a JSON string ({problem.msg})") from None
        self.position = token.end()
        return word

    def rest(self) -> str:
        return self.text[self.position :].strip()

    def error(self, expected: str) -> ValueError:
        return ValueError(f"selector {self.text!r}: found {self.rest()[:20] or 'the end'!r}; expected {expected}")
