"""Floating point operations of a round: two for each multiplication in its convolutions and products of matrices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_pers as fp
from benchmarks.workloads import Workload


def operations(task: fp.Task, workload: Workload, algorithm: fp.Algorithm) -> float:
    """Those of one gradient step on a full batch, times the steps of all clients.

    As is usual, products with the padding around an image count, and element-wise operations do not.
    """
    batch = {name: jnp.zeros((workload.batch, *shape), dtype) for name, shape, dtype in task.example}
    batch["weight"] = jnp.ones(workload.batch)
    parts = algorithm.layout.init(task.init(jax.random.key(0)))
    moving = {name: x for name, x in {**parts.shared, **parts.personal}.items() if name in algorithm.layout.trainable}
    view = algorithm.layout.view("model")

    def loss(moving: Any) -> Any:
        def chosen(leaves: Any) -> Any:
            return {name: moving.get(name, x) for name, x in leaves.items()}

        now = parts._replace(shared=chosen(parts.shared), personal=chosen(parts.personal))
        return task.loss(view.read(now), batch, jax.random.key(0))[0]

    steps = np.ceil(workload.sizes / workload.batch).sum()
    return float(_of(jax.make_jaxpr(jax.grad(loss))(moving).jaxpr) * steps)


def _of(jaxpr: Any) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * equation.outvars[0].aval.size * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
    if equation.primitive.name == "conv_general_dilated":
        features, *_ = equation.params["dimension_numbers"].rhs_spec
        kernel = equation.invars[1].aval
        zeros = math.prod(equation.params["lhs_dilation"])  # between the numbers of a strided convolution's gradient
        return 2 * equation.outvars[0].aval.size * kernel.size // kernel.shape[features] / zeros
    inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
    return sum(_of(each) for each in inner if hasattr(each, "eqns"))
