"""The order in which functions use leaves, read from functions written so that it is plain to see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_pers.paths import flatten, unflattener
from fedjax_pers.tracing import model_order


def order(function, **leaves) -> list[str]:
    return list(model_order(function, leaves, jnp.ones((3, 4))))


W = jnp.ones((4, 4))


def test_weights_prepared_up_front_keep_the_order_of_use() -> None:
    def forward(v, x):
        v = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), v)
        v = {name: leaf / jnp.linalg.norm(leaf) for name, leaf in v.items()}
        return x @ v["z"] @ (v["b"] @ v["a"]) @ v["c"]

    assert order(forward, a=W, b=W, c=W, z=W) == ["z", "a", "b", "c"]


def test_leaves_that_meet_the_batch_together_are_ordered_by_when_they_met_each_other() -> None:
    def forward(v, x):
        generated = v["c"] @ v["b"]
        return x @ (generated @ v["a"])

    assert order(forward, a=W, b=W, c=W) == ["b", "c", "a"]


def test_leaves_that_do_not_meet_the_batch_come_last_and_those_without_influence_are_left_out() -> None:
    assert order(lambda v, x: (x @ v["z"], v["b"], v["a"] * 0), a=W, b=W, c=W, z=W) == ["z", "a", "b"]


def test_calls_of_compiled_and_differentiated_functions_are_looked_into() -> None:
    @jax.custom_vjp
    def doubled(x, w):
        return 2 * x @ w

    doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda kept, g: kept)

    @jax.custom_jvp
    def squared(x, w, v):
        return (x @ w @ v) ** 2

    squared.defjvp(lambda primals, tangents: (squared(*primals), tangents[0]))

    def forward(v, x):
        x = jax.jit(lambda v, x: jax.checkpoint(lambda w, x: x @ w)(v["d"], x) @ v["a"])({"a": v["a"], "d": v["d"]}, x)
        return squared(doubled(x, v["c"]), v["e"], v["b"])

    assert order(forward, a=W, b=W, c=W, d=W, e=W) == ["d", "a", "c", "e", "b"]


def test_loops_and_branches_are_looked_into() -> None:
    def forward(v, x):
        x = jax.lax.cond(x.sum() > 0, lambda v, x: x @ v["f"] @ v["e"], lambda v, x: x, v, x)
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, v["d"])
        x = jax.lax.while_loop(lambda x: (x @ v["c"]).sum() > 0, lambda x: x @ v["b"], x)
        return jax.lax.fori_loop(0, 3, lambda i, x: x @ v["a"], x)

    assert order(forward, a=W, b=W, c=W, d=jnp.ones((2, 4, 4)), e=W, f=W) == ["f", "e", "d", "c", "b", "a"]


def test_a_delay_within_a_loop_carries_the_batch() -> None:
    def forward(v, x):
        def turn(carry, row):
            return (row, carry[0], carry[1]), None

        zero = jnp.zeros(4)
        (_, _, oldest), _ = jax.lax.scan(turn, (zero, zero, zero), x)
        return oldest @ v["z"] + x.sum(0) @ v["a"]

    assert order(forward, a=W, z=W) == ["z", "a"]


def test_choosing_and_passing_leaves_on_is_no_use() -> None:
    def chosen_by_the_batch(v, x):
        w = jax.lax.cond(x.sum() > 0, lambda: v["a"], lambda: v["b"])
        return x @ v["z"] @ w

    def swapped_by_the_batch(v, x):
        _, a, b = jax.lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[2], c[1]), (x.sum(), v["a"], v["b"]))
        return x @ v["z"] @ a @ b

    assert order(chosen_by_the_batch, a=W, b=W, z=W) == ["z", "a", "b"]
    assert order(swapped_by_the_batch, a=W, b=W, z=W) == ["z", "a", "b"]


def test_the_model_is_traced_and_never_run() -> None:
    def forward(v, x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return x @ v["a"]

    shapes = jax.eval_shape(lambda: {"a": W})
    assert model_order(forward, shapes, jax.ShapeDtypeStruct((3, 4), "float32")) == ("a",)


def test_a_tree_of_any_kind_can_be_traced() -> None:
    tree = [W, {"k": W}]
    rebuild = unflattener(tree)
    leaves = flatten(tree)
    assert model_order(lambda v, x: x @ rebuild(v)[1]["k"] @ rebuild(v)[0], leaves, jnp.ones((3, 4))) == ("1/k", "0")
