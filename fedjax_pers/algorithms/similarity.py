"""Methods whose server mixes a model for every client out of the models of those that are like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedjax_pers.aggregators import measures
from fedjax_pers.aggregators import similarity as rules
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Task
from fedjax_pers.checks import number, one_of, positive, require
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics, by_role, shared_or_refused, shared_shapes
from fedjax_pers.local import for_epochs, train
from fedjax_pers.objectives import add, proximal, task_loss
from fedjax_pers.paths import SelectorLike, flatten, nothing
from fedjax_pers.presets import head

_FAMILY = {
    "family": "similarity",
    "personal": "nothing, or any chosen leaves; the server keeps a model for each client",
    "secure_aggregation": False,
}
_AMP = (
    'Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, '
    "arXiv:2007.03797"
)


def _attentive(
    task: Task,
    rule: Any,
    lr: Any,
    strength: Any,
    personal: SelectorLike,
    newcomer_epochs: int,
    statistics: Statistics,
    local: dict[str, Any],
) -> Algorithm:
    return compose(
        task,
        layout=shared_or_refused(by_role(personal=personal, statistics=statistics), task),
        client=train(lr, **local, objective=add(task_loss(), proximal(strength))),
        aggregator=rules.mixing_all(rule),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local)),
    )


@register(
    "fedamp", title="FedAMP", paper=_AMP, reduction="alpha -> 0 with lam / alpha fixed: local training", **_FAMILY
)
def fedamp(
    task: Task,
    *,
    lr: float = 0.1,
    lam: float = 1.0,
    alpha: float = 0.1,
    sigma: float = 1.0,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Message passing between models that are near: ``u_i = sum_j xi_ij w_j``, then ``w_i`` is trained near ``u_i``.

    ``xi_ij = alpha exp(-|w_i - w_j|^2 / sigma) / sigma`` for others, ``xi_ii`` what is left of 1; the client minimises
    ``f_i(w) + lam / (2 alpha) |w - u_i|^2``.

    Args:
      task: model and loss.
      lr: step size.
      lam: strength of the tie to ``u_i``, at least 0; ``lr * lam / alpha`` above 2 diverges.
      alpha: step size of message passing, above 0; ``alpha * (clients - 1) / sigma <= 1`` keeps ``xi_ii`` from being
        cut to 0.
      sigma: squared distance at which similarity has fallen to 1/e.
      personal: leaves that stay; similarity is of the shared ones alone.
      newcomer_epochs: passes over its data of an unseen client, from the mean model, before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: clients start from ``u_i`` and take SGD steps (the paper minimises exactly); absent
    clients are mixed with their last models.
    """
    number("lam", lam, low=0)
    positive("alpha", alpha)
    rule = rules.fedamp(alpha, sigma)
    return _attentive(task, rule, lr, lam / alpha, personal, newcomer_epochs, statistics, local)


@register(
    "heurfedamp", title="HeurFedAMP", paper=_AMP, reduction="own = 1: local training with a proximal term", **_FAMILY
)
def heurfedamp(
    task: Task,
    *,
    lr: float = 0.1,
    lam: float = 0.1,
    own: float = 0.5,
    sigma: float = 10.0,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAMP with a fixed share for the client's own model: others share ``1 - own`` by ``softmax(sigma cos)``.

    Args:
      task: model and loss.
      lr: step size.
      lam: strength of the proximal term ``lam / 2 |w - u_i|^2``, at least 0.
      own: share of the client's own model, in 0 .. 1.
      sigma: how sharply others are told apart.
      personal: leaves that stay; similarity is of the shared ones alone.
      newcomer_epochs: passes over its data of an unseen client, from the mean model, before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: as in FedAMP; the tie is one number ``lam`` (the paper's ``lambda / alpha``).
    """
    number("lam", lam, low=0)
    return _attentive(task, rules.heurfedamp(own, sigma), lr, lam, personal, newcomer_epochs, statistics, local)


@register(
    "pfedgraph",
    title="pFedGraph",
    paper='Ye, Ni, Wu, Chen, Wang, "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023',
    reduction="lam -> infinity: FedAvg; lam -> 0: local training",
    **_FAMILY,
)
def pfedgraph(
    task: Task,
    *,
    lr: float = 0.1,
    lam: float = 1.0,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Collaboration weights on the simplex: near the clients' shares, and high where updates point the same way.

    ``a_i = project(p - d_i / (2 lam))``, ``d_ij = -cos(D_i, D_j)``; the client's next model is ``sum_j a_ij w_j``.

    Args:
      task: model and loss.
      lr: step size.
      lam: how much the shares ``p`` count against similarity, above 0.
      personal: leaves that stay; similarity is of the shared ones alone.
      newcomer_epochs: passes over its data of an unseen client, from the mean model, before it predicts.
      weights: ``p``, as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: no cosine regulariser in local training.
    """
    return compose(
        task,
        layout=shared_or_refused(by_role(personal=personal, statistics=statistics), task),
        client=train(lr, **local),
        aggregator=rules.mixing(rules.pfedgraph(lam), weights=weights),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local)),
    )


@register(
    "similarity",
    title="Similarity-weighted averaging",
    paper="a general form; the kernel is that of HeurFedAMP (AAAI 2021), with shares",
    reduction="temperature -> infinity: FedAvg; temperature -> 0: local training",
    **_FAMILY,
)
def similarity(
    task: Task,
    *,
    lr: float = 0.1,
    temperature: float = 0.1,
    measure: str = "updates",
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Each client's next model is a mean of all of the round, with weights ``p_j exp(cos_ij / temperature)``.

    Args:
      task: model and loss.
      lr: step size.
      temperature: above 0; a large one is the plain mean.
      measure: cosine of ``"updates"``, of ``"models"``, of their ``"heads"``, or of the deviations of clients'
        ``"moments"`` (mean and spread of their inputs, which they send; labels are not looked at); or a function of
        :class:`fedjax_pers.aggregators.Crowd`.
      personal: leaves that stay; similarity is of the shared ones alone.
      newcomer_epochs: passes over its data of an unseen client, from the mean model, before it predicts.
      weights: ``p``, as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: there is no one paper.
    """
    layout = shared_or_refused(by_role(personal=personal, statistics=statistics), task)
    how, asked = _measure(measure, layout(task))
    return compose(
        task,
        layout=layout,
        client=train(lr, **local),
        aggregator=rules.mixing(rules.by_similarity(how, temperature), weights=weights, **asked),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local)),
    )


def _measure(measure: Callable[[measures.Crowd], Array] | str, layout: Layout) -> tuple[Any, dict[str, Any]]:
    """The measure of that name, and what clients are asked for it."""
    if callable(measure):
        return measure, {}
    one_of("measure", measure, ("updates", "models", "heads", "moments"))
    match measure:
        case "updates":
            return measures.of_updates, {}
        case "models":
            return measures.of_models, {}
        case "heads":
            leaves = flatten(jax.eval_shape(layout.task.init, jax.random.key(0)))
            heads = head(1).select(leaves, layout.model) & shared_shapes(layout).keys()
            require(bool(heads), "measure: found 'heads', but no leaf of the head is shared here")
            return measures.of_leaves(sorted(heads)), {}
    measures.input_fields(layout)  # a task without them, before any work
    return measures.of_moments, {"ask": measures.input_moments, "says": (measures.MOMENTS,)}
