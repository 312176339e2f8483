"""Gates: how much each expert of a mixture is believed, example by example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array, Batch, Task
from fedjax_pers.checks import positive_int, require
from fedjax_pers.head_inputs import head_and_features, with_head_input
from fedjax_pers.paths import SelectorLike

EXPERTS, GATE = "experts", "gate"
GATE_LEAVES = f"{GATE}/**"


class Gate(NamedTuple):
    """How much each expert is believed.

    Attributes:
      experts: how many there are.
      init: ``init(key) -> variables`` of the gate.
      log_weights: ``log_weights(variables, batch) -> [batch, experts]`` of the *mixture's* variables; the weights are
        not negative and add up to 1.
    """

    experts: int
    init: Callable[[Array], Any]
    log_weights: Callable[[Any, Batch], Array]


class Reading(NamedTuple):
    """What a gate looks at: ``read(variables, batch) -> [batch, width]``, of the mixture's variables."""

    width: int
    read: Callable[[Any, Batch], Array]


def inputs_of(task: Task) -> Reading:
    """The inputs ``x`` themselves, flat; ValueError where they are no floating numbers."""
    found = {name: (shape, dtype) for name, shape, dtype in task.example or ()}.get("x")
    if found is None or not jnp.issubdtype(jnp.dtype(found[1]), jnp.floating):
        raise ValueError(f"task: found inputs x {found}; a gate on the inputs needs the field x, of floating numbers")
    return Reading(int(np.prod(found[0])), lambda variables, batch: batch["x"].reshape(batch["x"].shape[0], -1))


def features_of(task: Task, head: SelectorLike, expert: int = 0) -> Reading:
    """What enters the head of one of the experts, in evaluation mode; no gradient passes from the gate to them."""
    require(task.apply is not None, "task: found one without apply, of which features are read")
    names, width = head_and_features(task, head)

    def read(variables: Any, batch: Batch) -> Array:
        _, features = with_head_input(task.apply, names)(variables[EXPERTS][expert], batch, None)
        return jax.lax.stop_gradient(features)

    return Reading(width, read)


def constant_gate(experts: int) -> Gate:
    """The same weights for every example, ``gate/weights [experts]``, uniform at first."""
    positive_int("experts", experts)

    def log_weights(variables: Any, batch: Batch) -> Array:
        rows = jax.tree.leaves(batch)[0].shape[0]
        return jnp.broadcast_to(jnp.log(variables[GATE]["weights"]), (rows, experts))

    return Gate(experts, lambda key: {"weights": jnp.ones(experts) / experts}, log_weights)


def linear_gate(reading: Reading, experts: int) -> Gate:
    """``softmax(A x + c)``: ``gate/kernel [width, experts]`` and ``gate/bias [experts]``, 0 at first (uniform)."""
    positive_int("experts", experts)

    def log_weights(variables: Any, batch: Batch) -> Array:
        gate = variables[GATE]
        return jax.nn.log_softmax(reading.read(variables, batch) @ gate["kernel"] + gate["bias"], axis=1)

    def init(key: Array) -> Any:
        return {"kernel": jnp.zeros((reading.width, experts)), "bias": jnp.zeros(experts)}

    return Gate(experts, init, log_weights)


def logistic_gate(reading: Reading) -> Gate:
    """Two experts, ``sigmoid(a x + c)`` for the first: ``gate/kernel [width]`` and ``gate/bias``, 0 at first."""

    def log_weights(variables: Any, batch: Batch) -> Array:
        gate = variables[GATE]
        score = reading.read(variables, batch) @ gate["kernel"] + gate["bias"]
        return jnp.stack([jax.nn.log_sigmoid(score), jax.nn.log_sigmoid(-score)], axis=1)

    return Gate(2, lambda key: {"kernel": jnp.zeros(reading.width), "bias": jnp.zeros(())}, log_weights)
