"""FedFomo: a client judges models of others on data that it keeps back, and moves towards those that help it."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators.peers import first_order
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Context, Parts, Report, Task
from fedjax_pers.batches import split_off
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics, by_role, shared_or_refused
from fedjax_pers.local import ClientUpdate, for_epochs, train
from fedjax_pers.paths import SelectorLike, nothing


@register(
    "fedfomo",
    title="FedFomo",
    paper='Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model '
    'Optimization", ICLR 2021, arXiv:2012.08565',
    family="similarity",
    personal="nothing, or any chosen leaves; the server keeps a model for each client and sends it to others",
    reduction="no model of another client is better on the data kept back: local training",
    secure_aggregation=False,
)
def fedfomo(
    task: Task,
    *,
    lr: float = 0.1,
    models: int = 5,
    explore: float = 0.3,
    decay: float = 0.05,
    kept_back: float = 0.2,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """A client receives some models of others and begins at ``w_i + sum_n s_n (w_n - w_i)``, then trains that.

    ``s_n`` is in proportion to ``max(0, (L_i(w_i) - L_i(w_n)) / |w_n - w_i|)``, the loss being of examples that the
    client does not train on. It predicts with the model that it trained last. Other clients' models are shown to it.

    Args:
      task: model and loss.
      lr: step size.
      models: that a client receives in a round at most, its own among them; at least 2.
      explore: probability that these are random and not those which have helped it most, in 0 .. 1.
      decay: what that probability loses a round.
      kept_back: share of its training examples on which a client judges, in 0 .. 1; at least one where it has two.
      personal: leaves that stay; models are then compared with the client's own ones in place.
      newcomer_epochs: passes over its data of an unseen client, from the mean model, before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: a client's own model is one of those that are sent; the examples to judge on are taken
    from its training split; one coin a client and round decides on exploration.
    """
    return compose(
        task,
        layout=shared_or_refused(by_role(personal=personal, statistics=statistics), task),
        client=_on_the_rest(train(lr, **local), kept_back),
        aggregator=first_order(models, explore=explore, decay=decay, kept_back=kept_back),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local)),
    )


def _on_the_rest(training: ClientUpdate, kept_back: Any) -> ClientUpdate:
    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        rest, _ = split_off(context, kept_back)
        return training(layout, parts, rest)

    return update
