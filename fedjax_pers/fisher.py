"""How much the predictions of a model depend on each of its numbers: the diagonal of the Fisher information."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.batches import sweep
from fedjax_pers.checks import one_of, positive_int, require
from fedjax_pers.layouts import Layout, replace
from fedjax_pers.local import ClientUpdate, chosen_leaves
from fedjax_pers.objectives import require_classes
from fedjax_pers.paths import SelectorLike, as_selector, everything

Loss = Callable[[Leaves, Batch], Array]
"""``loss(training, example)``: of one example, the negative logarithm of its label's probability."""
Squares = Callable[[Leaves, Batch], Leaves]


def _by_prediction(task: Task, loss: Loss) -> Squares:
    """``sum_y p(y | x) (d log p(y | x))^2``, the expectation over all classes."""

    def squares(training: Leaves, example: Batch) -> Leaves:
        def add_class(total: Leaves, label: Array) -> tuple[Leaves, None]:
            as_label = {**example, "y": label.astype(example["y"].dtype)}
            value, slope = jax.value_and_grad(loss)(training, as_label)
            return jax.tree.map(lambda t, g: t + jnp.exp(-value) * jnp.square(g), total, slope), None

        return jax.lax.scan(add_class, _zeros(training), jnp.arange(task.num_classes))[0]

    return squares


def _by_observation(task: Task, loss: Loss) -> Squares:
    """``(d log p(y | x))^2`` of the label that the example has."""
    return lambda training, example: jax.tree.map(jnp.square, jax.grad(loss)(training, example))


def _zeros(training: Leaves) -> Leaves:
    """In float32 at least: thousands of small squares are added up."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), training)


SQUARES = {"predicted": _by_prediction, "observed": _by_observation}


def fisher_information(
    layout: Layout, parts: Parts, context: Context, training: Leaves, *, labels: str = "predicted", batch_size: int = 32
) -> Leaves:
    r"""The diagonal of the Fisher information of the model that predicts, over a client's examples.

    .. math:: F_j = \frac{1}{n} \sum_x \sum_y p(y \mid x) \left(\partial_j \log p(y \mid x)\right)^2

    Squares are of each example's gradient: the square of a batch's mean gradient is another, much smaller number. The
    model is in evaluation mode. A client without examples has 0.

    Args:
      layout: whose ``"model"`` view is meant.
      parts: where the model is taken.
      context: of the client.
      training: the leaves of which it is wanted, by name.
      labels: ``"predicted"`` is the expectation over the model's own predictions, exactly; ``"observed"`` takes the
        labels that the examples have (the *empirical* Fisher information).
      batch_size: examples at once; it changes the memory that is needed, not the result.

    Returns:
      Leaves of the names and shapes of ``training``, in float32 at least.

    Raises:
      ValueError: the task's criterion is no negative log-probability of one label an example, as far as can be seen.

    Source: Kunstner, Balles, Hennig, "Limitations of the Empirical Fisher Approximation for Natural Gradient Descent",
    NeurIPS 2019, arXiv:1905.12558.
    """
    task, read = layout.task, layout.view("model").read
    require_classes(task, "the Fisher information")
    require(
        context.data["y"].ndim == 1,
        f"task: found labels of shape {context.data['y'].shape[1:]}; the Fisher information needs one label an example",
    )

    def loss(training: Leaves, example: Batch) -> Array:
        one = {name: x[None] for name, x in example.items()}
        outputs, _ = task.apply(read(replace(parts, training)), one, None)
        return task.criterion(outputs, one)[0]

    squares = SQUARES[labels](task, loss)

    def add_batch(total: Leaves, batch: Batch) -> Leaves:
        counts = batch["weight"] > 0
        found = jax.vmap(lambda example: squares(training, example))(
            {**batch, "weight": jnp.ones_like(batch["weight"])}
        )
        rows = jax.tree.map(lambda x: jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, 0), found)
        return jax.tree.map(lambda t, x: t + x.sum(0), total, rows)

    total = sweep(add_batch, _zeros(training), context, batch_size=batch_size)
    return jax.tree.map(lambda t: t / jnp.maximum(context.size, 1), total)


def with_fisher(
    make: Callable[[Leaves], ClientUpdate],
    *,
    leaves: SelectorLike = everything,
    labels: str = "predicted",
    batch_size: int = 32,
) -> ClientUpdate:
    """A client update made of the Fisher information of the model as it was received, on the client's own examples.

    Example:
      >>> from fedjax_pers import train
      >>> from fedjax_pers.objectives import add, ewc, task_loss
      >>> tuned = with_fisher(lambda fisher: train(0.1, epochs=5, objective=add(task_loss(), ewc(1.0, fisher))))

    Args:
      make: ``make(fisher) -> update``.
      leaves: those whose information is wanted; that of others is not computed.
      labels: as in :func:`fisher_information`.
      batch_size: as there.
    """
    one_of("labels", labels, SQUARES)
    positive_int("batch_size", batch_size)
    chosen = as_selector(leaves)

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        training = chosen_leaves(layout, context.received, "all", chosen)
        fisher = fisher_information(layout, context.received, context, training, labels=labels, batch_size=batch_size)
        return make(fisher)(layout, parts, context)

    return update
