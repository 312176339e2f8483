"""Paths, globs, unions and roles; what ``.gitignore`` means is checked against git itself."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from fedjax_pers.paths import (
    as_selector,
    assign,
    everything,
    flatten,
    nearest,
    nothing,
    select,
    unflattener,
    where,
)

LEAVES = dict.fromkeys(
    [
        "body/conv1/bias",
        "body/conv1/kernel",
        "body/conv10/kernel",
        "body/head/scale",
        "head/bias",
        "head/kernel",
        "head/out/kernel",
        "scale",
    ],
    0,
)


def chosen(selector: object) -> list[str]:
    return sorted(select(selector, LEAVES))


# Flattening


def nnx_model() -> nnx.State:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            self.blocks = nnx.List([nnx.LayerNorm(3, rngs=nnx.Rngs(0))])

    return nnx.state(Net())


def haiku_model() -> tuple[dict, dict]:
    model = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(hk.nets.MLP([2])(x), True))
    return model.init(jax.random.key(0), jnp.ones((2, 2)))


TREES = {
    "dict": (lambda: {"b": [jnp.ones(2), (jnp.zeros(1),)], "a": None}, ["b/0", "b/1/0"]),
    "integer keys": (lambda: {2: jnp.ones(1), 10: jnp.ones(1)}, ["2", "10"]),
    "array": (lambda: jnp.arange(3), ["value"]),
    "empty": (dict, []),
    "linen": (
        lambda: nn.Sequential([nn.Dense(2)]).init(jax.random.key(0), jnp.ones((1, 2))),
        ["params/layers_0/bias", "params/layers_0/kernel"],
    ),
    "nnx state": (
        nnx_model,
        ["blocks/0/bias/value", "blocks/0/scale/value", "dense/bias/value", "dense/kernel/value"],
    ),
    "nnx dict": (
        lambda: nnx.to_pure_dict(nnx_model()),
        ["blocks/0/bias", "blocks/0/scale", "dense/bias", "dense/kernel"],
    ),
    "equinox": (
        lambda: {"net": [eqx.nn.Linear(2, 3, key=jax.random.key(0))]},
        ["net/0/weight", "net/0/bias"],
    ),
    "haiku": (
        haiku_model,
        ["0/batch_norm/offset", "0/batch_norm/scale", "0/mlp/~/linear_0/b", "0/mlp/~/linear_0/w"]
        + [f"1/batch_norm/~/{of}_ema/{leaf}" for of in ("mean", "var") for leaf in ("average", "counter", "hidden")],
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_flatten_names_leaves_and_unflattener_inverts_it(name: str) -> None:
    make, paths = TREES[name]
    tree = make()
    leaves = flatten(tree)
    assert list(leaves) == paths
    backwards = dict(reversed(leaves.items()))
    rebuilt = unflattener(tree)(backwards)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(tree), strict=True))


def test_flatten_refuses_paths_that_are_not_unique_or_empty() -> None:
    with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
        flatten({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(ValueError, match="empty key"):
        flatten({"a": {"": 1}})


def test_flatten_and_unflattener_work_on_shapes_and_under_jit() -> None:
    tree = {"a": jnp.ones(2), "b": [jnp.zeros(3)]}
    rebuild = unflattener(jax.eval_shape(lambda: tree))
    doubled = jax.jit(lambda tree: rebuild({path: 2 * leaf for path, leaf in flatten(tree).items()}))(tree)
    np.testing.assert_array_equal(doubled["a"], [2, 2])


def test_unflattener_lists_missing_and_unexpected_leaves() -> None:
    with pytest.raises(ValueError, match=r"missing \['b'\], unexpected \['c'\]"):
        unflattener({"a": 1, "b": 2})({"a": 1, "c": 3})
    with pytest.raises(ValueError, match=r"unexpected \['c'\]"):
        unflattener({"a": 1})({"a": 1, "c": 3})


# Globs


@pytest.mark.parametrize(
    ("pattern", "paths"),
    {
        "head": ["body/head/scale", "head/bias", "head/kernel", "head/out/kernel"],
        "/head": ["head/bias", "head/kernel", "head/out/kernel"],
        "body/head": ["body/head/scale"],
        "scale": ["body/head/scale", "scale"],
        "/scale": ["scale"],
        "scale/": None,
        "head/": ["body/head/scale", "head/bias", "head/kernel", "head/out/kernel"],
        "head/**": ["head/bias", "head/kernel", "head/out/kernel"],
        "head/*": ["head/bias", "head/kernel", "head/out/kernel"],
        "head/*/": ["head/out/kernel"],
        "head/*/kernel": ["head/out/kernel"],
        "head/**/kernel": ["head/kernel", "head/out/kernel"],
        "**/head": ["body/head/scale", "head/bias", "head/kernel", "head/out/kernel"],
        "**/kernel": ["body/conv1/kernel", "body/conv10/kernel", "head/kernel", "head/out/kernel"],
        "*/kernel": ["head/kernel"],
        "conv?": ["body/conv1/bias", "body/conv1/kernel"],
        "conv*/kernel": None,
        "**/conv*/kernel": ["body/conv1/kernel", "body/conv10/kernel"],
        "conv[0-9]": ["body/conv1/bias", "body/conv1/kernel"],
        "conv1[!1]": ["body/conv10/kernel"],
        "body/{conv1,conv10}/kernel": ["body/conv1/kernel", "body/conv10/kernel"],
        "**/{conv1,head}/{bias,kernel}": ["body/conv1/bias", "body/conv1/kernel", "head/bias", "head/kernel"],
        "body/{conv1,conv2}/kernel": None,
        "body/c**1": ["body/conv1/bias", "body/conv1/kernel"],
        "Head": None,
        "ead": None,
        "body*kernel": None,
        "**": sorted(LEAVES),
        "*": sorted(LEAVES),
        "/*": sorted(LEAVES),
    }.items(),
)
def test_globs(pattern: str, paths: list[str] | None) -> None:
    if paths is None:
        with pytest.raises(ValueError, match="matches no leaf"):
            select(pattern, LEAVES)
    else:
        assert chosen(pattern) == paths


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the reference here")
def test_globs_mean_what_they_mean_to_git(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*words: str, **options) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, **options)

    git("init", "-q", check=True)
    names = ["a", "b", "ab"]
    paths = ["/".join(segments) for size in (1, 2, 3) for segments in itertools.product(names, repeat=size)]
    words = ["a", "b*", "?", "*b", "[!a]", "**", "**b"]
    patterns = ["/".join(segments) for size in (1, 2, 3) for segments in itertools.product(words, repeat=size)]
    drawn = np.random.default_rng(0).choice(patterns, 150, replace=False).tolist()
    for i, pattern in enumerate([*words, *drawn]):
        pattern = f"{'/' * (i % 5 == 0)}{pattern}{'/' * (i % 3 == 0)}"
        (tmp_path / ".gitignore").write_text(pattern + "\n")
        ignored = git("check-ignore", "--no-index", "--stdin", input="\n".join(paths)).stdout.split()
        try:
            found = select(pattern, dict.fromkeys(paths, 0))
        except ValueError:
            found = frozenset()
        assert found == frozenset(ignored), pattern


@pytest.mark.parametrize("pattern", ["", "/", "//", "a//b", "//a", "!head"])
def test_patterns_that_can_never_match_are_refused_when_made(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        as_selector(pattern)


# Other makers


def test_lists_are_unions_and_regular_expressions_match_in_full() -> None:
    assert chosen(["/scale", ("head/bias",)]) == ["head/bias", "scale"]
    assert chosen([]) == []
    assert chosen(re.compile("head/.*")) == ["head/bias", "head/kernel", "head/out/kernel"]
    assert chosen(re.compile("HEAD/B.*", re.IGNORECASE)) == ["head/bias"]
    with pytest.raises(ValueError, match="matches no leaf"):
        select(re.compile("head"), LEAVES)
    with pytest.raises(ValueError, match="bytes"):
        as_selector(re.compile(b"head"))


def test_where_sees_path_and_leaf_and_must_answer_true_or_false() -> None:
    leaves = {"a": np.zeros(2), "b": np.zeros((2, 2))}
    assert select(where(lambda path, leaf: np.bool_(leaf.ndim == 2)), leaves) == {"b"}
    with pytest.raises(ValueError, match="expected True or False"):
        select(where(lambda path, leaf: None), leaves)
    with pytest.raises(ValueError, match="expected a function"):
        where("head")


@pytest.mark.parametrize(
    ("value", "message"),
    [(len, r"wrap it, where\(len\)"), (None, "found None"), ({"a"}, "found {'a'}"), (3, "found 3")],
)
def test_other_values_are_no_selectors(value: object, message: str) -> None:
    for convert in (as_selector, lambda value: everything & value, lambda value: ["head", value] | everything):
        with pytest.raises(ValueError, match=message):
            convert(value)


def test_a_pattern_that_matches_nothing_is_an_error_wherever_it_stands() -> None:
    for selector in ("haed", ["head", "haed"], ~as_selector("haed"), nothing & "haed", "haed" & everything):
        with pytest.raises(ValueError, match="pattern haed matches no leaf; nearest: (body/)?head$"):
            select(selector, LEAVES)
    with pytest.raises(ValueError, match="nearest: head/out/kernel"):
        select("head/uot/kernel", LEAVES)
    with pytest.raises(ValueError, match=r"parse\(\.\.\.\)"):
        select("head(1)", LEAVES)
    with pytest.raises(ValueError, match="there are no leaves"):
        select("head", {})
    assert select(nothing, LEAVES) == frozenset()


def test_select_wants_flat_leaves() -> None:
    with pytest.raises(ValueError, match="flatten"):
        select("a", {"a": {"b": 1}})
    with pytest.raises(ValueError, match="flatten"):
        select(everything, {0: 1})


# Roles


def test_assign_gives_every_leaf_one_role() -> None:
    roles = assign({"personal": "head/**", "frozen": "body"}, LEAVES, default="shared")
    assert list(roles) == list(LEAVES)
    assert {role: sum(r == role for r in roles.values()) for role in ("personal", "frozen", "shared")} == {
        "personal": 3,
        "frozen": 4,
        "shared": 1,
    }
    assert assign({"a": select("head", LEAVES), "b": ~as_selector("head")}, LEAVES) == {
        path: "a" if "head" in path else "b" for path in LEAVES
    }


def test_assign_refuses_leaves_claimed_twice_or_by_none_or_unknown() -> None:
    with pytest.raises(ValueError, match="'body/conv1/bias' is claimed by 'x' and 'z'"):
        assign({"x": "bias", "y": "/scale", "z": "body"}, LEAVES, default="shared")
    with pytest.raises(ValueError, match="'body/conv1/bias' is claimed by no role; roles are 'x'"):
        assign({"x": "head"}, LEAVES)
    with pytest.raises(ValueError, match="claims 'head/bais', which is no leaf; nearest: .'head/bias'"):
        assign({"x": frozenset({"head/bais"})}, LEAVES, default="shared")


def test_nearest_keeps_case_and_order() -> None:
    assert nearest("HAED", ["head", "Heads", "body"])[0] == "head"
    assert nearest("qqq", ["head"]) == []
