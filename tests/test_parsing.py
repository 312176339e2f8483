"""The algebra of selectors and their text form."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_pers.parsing import parse
from fedjax_pers.paths import Selector, as_selector, everything, nothing, select, where
from fedjax_pers.presets import (
    adapter,
    attention,
    bias,
    depth,
    embedding,
    feed_forward,
    head,
    lora,
    norm,
    norm_statistics,
)

LEAVES = dict.fromkeys(["body/conv1/bias", "body/conv10/kernel", "head/bias", "head/kernel", "head/out/kernel"], 0)


def globs() -> st.SearchStrategy[Selector]:
    words = st.sampled_from(["head", "kernel", "bias", "conv1", "/body", "head/**", "**", "*/kernel", "con*"])
    return words.map(as_selector)


def selectors(atoms: st.SearchStrategy[Selector]) -> st.SearchStrategy[Selector]:
    constants = st.sampled_from([everything, nothing])
    regexes = st.sampled_from([re.compile("head/.*"), re.compile('.*"?e.*', re.I)]).map(as_selector)

    def grown(inner: st.SearchStrategy[Selector]) -> st.SearchStrategy[Selector]:
        pairs = st.tuples(inner, inner)
        return pairs.map(lambda two: two[0] | two[1]) | pairs.map(lambda two: two[0] & two[1]) | inner.map(lambda s: ~s)

    return st.recursive(constants | regexes | atoms, grown, max_leaves=8)


@given(selectors(globs()), selectors(globs()), selectors(globs()))
def test_selectors_are_a_boolean_algebra(a: Selector, b: Selector, c: Selector) -> None:
    def same(x: Selector, y: Selector) -> bool:
        return select(x, LEAVES) == select(y, LEAVES)

    assert same(a | b, [a, b])
    assert select(a | b, LEAVES) == select(a, LEAVES) | select(b, LEAVES)
    assert select(a & b, LEAVES) == select(a, LEAVES) & select(b, LEAVES)
    assert select(~a, LEAVES) == set(LEAVES) - select(a, LEAVES)
    assert same(~(a | b), ~a & ~b)
    assert same(~(a & b), ~a | ~b)
    assert same(a & (b | c), (a & b) | (a & c))
    assert same(a | nothing, a)
    assert same(a & everything, a)
    assert same(a & ~a, nothing)
    assert ~~a == a
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)


def presets() -> st.SearchStrategy[Selector]:
    plain = st.sampled_from([norm(), norm_statistics(), embedding(), bias(), lora(), attention()])
    ends = st.builds(
        lambda make, n, by: make(n, by=by),
        st.sampled_from([head, depth]),
        st.integers(1, 99),
        st.sampled_from(["layer", "block"]),
    )
    return plain | ends


def valid_globs() -> st.SearchStrategy[Selector]:
    segments = st.text(min_size=1).filter(lambda text: "/" not in text)
    return st.lists(segments, min_size=1, max_size=3).map("/".join).filter(lambda p: p[0] != "!").map(as_selector)


@given(selectors(valid_globs() | presets()))
def test_text_reads_back(selector: Selector) -> None:
    again = parse(str(selector))
    assert again == selector
    assert hash(again) == hash(selector)
    assert str(again) == str(selector)
    assert pickle.loads(pickle.dumps(selector)) == copy.deepcopy(selector) == selector


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("head/** | (norm() & ~embed)", as_selector("head/**") | (norm() & ~as_selector("embed"))),
        ("a|b&~c", as_selector("a") | (as_selector("b") & ~as_selector("c"))),
        ("~(a | b)", ~(as_selector("a") | "b")),
        ("~~a", as_selector("a")),
        ("mlp/~/linear_0", as_selector("mlp/~/linear_0")),
        ('"~/w"', as_selector("~/w")),
        ('"nothing" | nothing', as_selector("nothing")),
        ("norm", as_selector("norm")),
        ("**/attention/{query,value} | a", as_selector("**/attention/{query,value}") | "a"),
        ("shallow() | deep()", head(1) | ~depth(1, by="block")),
        ("attention() & ~feed_forward()", attention() & ~feed_forward()),
        ("adapter()", adapter()),
        ("head(2, by=block)", head(2, by="block")),
        ('head(n=2, by="block",)', head(2, by="block")),
        ("head()", head(1)),
        ('regex("12")', as_selector(re.compile("12"))),
        ('regex("a, (b) \\" \\\\d")', as_selector(re.compile('a, (b) " \\d'))),
        (" everything ", everything),
    ],
)
def test_text_by_hand(text: str, selector: Selector) -> None:
    assert parse(text) == selector


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found 'the end'; expected a pattern"),
        ("a |", "found 'the end'"),
        ("a b", "found 'b'; expected .* or the end"),
        ("(a | b", "expected '\\)'"),
        ("a)", "found '\\)'"),
        ("haed(1)", "nearest: head"),
        ("shalow()", "there are head, depth, shallow, deep, .*nearest: shallow"),
        ("atention()", "nearest: attention"),
        ("deep(2)", "in deep"),
        ("where(f)", "call where"),
        ("head(0)", "found n=0"),
        ("head(1, by=blok)", "found by='blok'"),
        ("head(1, 2)", "head"),
        ("norm(1)", "norm"),
        ("head(1 2)", "expected '\\)'"),
        ('regex("(")', "regex"),
        ('"a\\q"', "JSON"),
        ('"a', "expected a pattern"),
        (None, "expected text"),
    ],
)
def test_text_that_is_no_selector(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_flags_of_a_regular_expression_are_in_its_text() -> None:
    leaves = {"A\nB": 0}
    selector = as_selector(re.compile("a.b", re.IGNORECASE | re.DOTALL))
    assert select(parse(str(selector)), leaves) == {"A\nB"}
    twice = as_selector(re.compile("(?i)a.b", re.IGNORECASE | re.DOTALL))
    assert select(parse(str(twice)), leaves) == {"A\nB"}


def test_selectors_print() -> None:
    assert repr(as_selector(["a", "b"]) & head(1)) == "Selector((a | b) & head(1))"
    assert str(where(len)) == "where(len)"
    assert str(~everything) == "~everything"
    assert str(as_selector("nothing")) == '"nothing"'
    with pytest.raises(ValueError, match="call where"):
        parse(str(where(len)))
