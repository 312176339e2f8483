"""A task made of a task: several models, the experts, and a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array, Batch, Leaves, Task
from fedjax_pers.checks import one_of, require
from fedjax_pers.judging import weighted_mean
from fedjax_pers.keys import fold_name
from fedjax_pers.mixtures.gates import EXPERTS, GATE, GATE_LEAVES, Gate
from fedjax_pers.paths import Model, Selector, as_selector, flatten, nothing, where

Level = Literal["probability", "logit"]
Answer = Callable[[list[Any], Array, Batch, Array | None], tuple[dict[str, Array], Leaves]]
"""``answer(experts, log_weights [batch, experts], batch, key) -> (scores by name [batch], tracked leaves by path)``."""


def mixture(task: Task, gate: Gate, *, level: Level = "probability") -> Task:
    """A task whose model is several models of a task, mixed by a gate.

    ``p(y | x) = sum_k g_k(x) p_k(y | x)`` at the level of probabilities, in log space throughout; the mixture of
    logits is ``softmax(sum_k g_k(x) z_k(x))``. The loss is ``-log p(y | x)``, whose gradient is that of expert k's own
    loss times its responsibility ``r_k``, in proportion to ``g_k(x) p_k(y | x)``.

    Metrics are ``loss``, ``accuracy``, ``routing_entropy`` (of g, in nats) and ``usage_0, usage_1, ...`` (g itself), so
    that they appear in tables by client.

    Example:
      >>> import fedjax_pers as fp
      >>> from fedjax_pers.mixtures import inputs_of, linear_gate, mixture
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "linear")
      >>> both = mixture(task, linear_gate(inputs_of(task), experts=2))
      >>> sorted(flatten(both.init(jax.random.key(0))))[:3]
      ['experts/0/params/head/bias', 'experts/0/params/head/kernel', 'experts/1/params/head/bias']

    Args:
      task: classification by cross-entropy with one label an example; or a task without ``apply``, whose ``loss`` is
        read as a negative log-likelihood and of which only that is mixed (densities).
      gate: it says how many experts there are; the first starts where the task alone would, the others from further
        random starts.
      level: what is mixed, ``"probability"`` or ``"logit"``.

    Raises:
      ValueError: the criterion is not cross-entropy of classes, or nothing is there to be mixed.
    """
    one_of("level", level, ("probability", "logit"))
    if task.apply is None:
        require(level == "probability", f"level: found {level!r}; the task has no apply, so there are no logits to mix")
        answer = _densities(task)
    else:
        require_cross_entropy(task)
        answer = _classes(task, _mixed_probabilities if level == "probability" else _mixed_logits)
    return task_of([task] * gate.experts, gate, answer)


def task_of(tasks: Sequence[Task], gate: Gate, answer: Answer, given: int = 0) -> Task:
    """The task of experts, one of each of these tasks, and a gate, whatever is made of them to answer.

    What it is trained and judged on is the first task's. ``given`` is the number of the expert that starts from
    variables of a single model, where a run has such.
    """

    def init(key: Array) -> Any:
        keys = [key, *(fold_name(key, f"expert {number}") for number in range(1, len(tasks)))]
        experts = [task.init(each) for task, each in zip(tasks, keys, strict=True)]
        return {EXPERTS: experts, GATE: gate.init(fold_name(key, GATE))}

    def adopt(variables: Any, key: Array) -> Any:
        if isinstance(variables, Mapping) and set(variables) == {EXPERTS, GATE}:
            return variables
        fresh = init(key)
        return {**fresh, EXPERTS: [variables if number == given else x for number, x in enumerate(fresh[EXPERTS])]}

    def loss(variables: Any, batch: Batch, key: Array | None) -> tuple[Array, Leaves]:
        scores, tracked = answer(variables[EXPERTS], gate.log_weights(variables, batch), batch, key)
        return weighted_mean(scores["loss"], batch["weight"]), tracked

    def metrics(variables: Any, batch: Batch) -> dict[str, Array]:
        log_weights = gate.log_weights(variables, batch)
        scores, _ = answer(variables[EXPERTS], log_weights, batch, None)
        weights = jnp.exp(log_weights)
        usage = {f"usage_{number}": weights[:, number] for number in range(len(tasks))}
        return {**scores, "routing_entropy": jax.scipy.special.entr(weights).sum(1), **usage}

    return Task(
        init,
        loss,
        metrics,
        statistics=statistics_below({path_of(k, ""): task for k, task in enumerate(tasks)}),
        example=tasks[0].example,
        kinds=tuple((path_of(k, path), kind) for k, task in enumerate(tasks) for path, kind in task.kinds),
        num_classes=tasks[0].num_classes,
        private=as_selector(GATE_LEAVES),
        adopt=adopt,
    )


def path_of(number: int, path: str) -> str:
    """Where a leaf or layer of a model lies in the mixture of which it is an expert.

    Example:
      >>> path_of(1, "params/head/bias")
      'experts/1/params/head/bias'
    """
    return f"{EXPERTS}/{number}/{path}".rstrip("/")


def tracked_of(number: int, tracked: Any) -> Leaves:
    """What an expert's loss tracks, by its path in the mixture."""
    found = flatten(tracked) if jax.tree.leaves(tracked) else {}
    return {path_of(number, path): x for path, x in found.items()}


def statistics_below(tasks: Mapping[str, Task]) -> Selector:
    """The running statistics of tasks whose variables lie below these paths."""
    found = set()
    for prefix, task in tasks.items():
        if task.statistics != nothing:
            leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
            found |= {f"{prefix}/{name}" for name in task.statistics.select(leaves, Model(None, task.kinds))}
    return where(lambda path, leaf: path in found) if found else nothing


def _densities(task: Task) -> Answer:
    """Of a task without outputs: ``-log sum_k g_k exp(-loss_k)`` and no other score."""

    def answer(experts: list[Any], log_weights: Array, batch: Batch, key: Array | None) -> Any:
        return {"loss": -jax.nn.logsumexp(log_weights - losses_of(task, experts, batch), axis=1)}, {}

    return answer


def _classes(task: Task, mixed: Callable[[Array, Array], Array]) -> Answer:
    def answer(experts: list[Any], log_weights: Array, batch: Batch, key: Array | None) -> Any:
        each = [task.apply(variables, batch, key) for variables in experts]
        outputs = mixed(jnp.stack([outputs for outputs, _ in each], axis=1), log_weights)
        tracked = {path: x for k, (_, found) in enumerate(each) for path, x in tracked_of(k, found).items()}
        return class_scores(task, outputs, batch), tracked

    return answer


def class_scores(task: Task, outputs: Array, batch: Batch) -> dict[str, Array]:
    """Loss and accuracy of logits (or log-probabilities) ``[batch, classes]``."""
    right = (outputs.argmax(1) == batch["y"]).astype(outputs.dtype)
    return {"loss": task.criterion(outputs, batch), "accuracy": right}


def _mixed_probabilities(outputs: Array, log_weights: Array) -> Array:
    """``log sum_k g_k softmax(z_k)``: ``[batch, experts, classes]`` to log-probabilities ``[batch, classes]``."""
    return jax.nn.logsumexp(log_weights[:, :, None] + jax.nn.log_softmax(outputs, axis=2), axis=1)


def _mixed_logits(outputs: Array, log_weights: Array) -> Array:
    return (jnp.exp(log_weights)[:, :, None] * outputs).sum(axis=1)


def require_cross_entropy(task: Task) -> None:
    """ValueError unless the criterion is the negative log-likelihood of classes, which is tried out."""
    labels = {name: (shape, dtype) for name, shape, dtype in task.example or ()}.get("y", (None, "int32"))
    classes = task.num_classes
    require(
        task.criterion is not None and classes is not None and labels[0] == (),
        f"task: found num_classes {classes}, labels y of shape {labels[0]}; a mixture needs apply, criterion, classes, "
        "and labels of shape (), one an example",
    )
    batch: Batch = {name: jax.ShapeDtypeStruct((2, *shape), dtype) for name, shape, dtype in task.example or ()}
    batch["weight"] = jax.ShapeDtypeStruct((2,), "float32")
    variables = jax.eval_shape(task.init, jax.random.key(0))
    outputs, _ = jax.eval_shape(lambda variables, batch: task.apply(variables, batch, None), variables, batch)
    found = "outputs of shape " + str(getattr(outputs, "shape", outputs))
    if getattr(outputs, "shape", ()) == (2, classes):
        with jax.ensure_compile_time_eval():
            logits = jnp.cos(jnp.arange(classes**2, dtype=jnp.float32)).reshape(classes, classes)
            batch = {"y": jnp.arange(classes, dtype=labels[1]), "weight": jnp.ones(classes)}
            losses = np.asarray(task.criterion(logits, batch))
            expected = -np.diag(jax.nn.log_softmax(logits, axis=1))
        if np.allclose(losses, expected, rtol=1e-4):
            return
        found = f"a criterion that is {losses[0]:.4g} where cross-entropy is {expected[0]:.4g}"
    raise ValueError(
        f"criterion: found {found}; a mixture of probabilities needs cross-entropy, -log softmax(outputs)[y], of "
        f"outputs [batch, {classes}]"
    )


def losses_of(task: Task, experts: list[Any], batch: Batch) -> Array:
    """Losses of the experts in evaluation mode, ``[batch, experts]``."""
    return jnp.stack([task.metrics(variables, batch)["loss"] for variables in experts], axis=1)
