"""pFedHN: a network on the server makes each client's model of an embedding of the client."""

from __future__ import annotations

from typing import Any

import optax

from fedjax_pers.aggregators import hypernetwork
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.generators import mlp
from fedjax_pers.layouts import Statistics, by_role, shared_or_refused
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import SelectorLike, nothing


@register(
    "pfedhn",
    title="pFedHN",
    paper='Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021, '
    "arXiv:2103.04628",
    family="hypernetwork",
    personal="what you choose; the server keeps an embedding of every client",
    reduction="embeddings that are all equal and stay: FedAvg with the server's step",
    secure_aggregation=False,
)
def pfedhn(
    task: Task,
    *,
    lr: float = 0.1,
    server_lr: float = 0.01,
    embedding_lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 0.001,
    hidden: tuple[int, ...] = (100, 100, 100),
    embedding: int = 0,
    personal: SelectorLike = nothing,
    newcomer_rounds: int = 10,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The client receives ``theta_i = h_phi(v_i)`` and sends what it trained; the server pulls the difference back.

    ``d_i = theta_i - theta_i'``; ``phi`` takes a step along the mean of ``(d theta_i / d phi)^T d_i``, ``v_i`` along
    ``(d theta_i / d v_i)^T d_i``, both from one linearisation. As many numbers travel as the model has, however large
    the generator is: it never leaves the server, nor do embeddings.

    Args:
      task: model and loss.
      lr: step size of the clients.
      server_lr: step size of the generator.
      embedding_lr: step size of embeddings.
      momentum: of both, in 0 .. 1.
      weight_decay: of both.
      hidden: widths of the generator's hidden layers.
      embedding: numbers in an embedding; 0 for ``1 + clients // 4``.
      personal: leaves that are not generated and stay with the client (the head: pFedHN-PC).
      newcomer_rounds: exchanges by which an unseen client's embedding is fitted, the generator being fixed.
      newcomer_epochs: passes over its data that an unseen client then trains its personal leaves for.
      statistics: treatment of running statistics that ``personal`` does not name; they are not generated.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: embeddings of absent clients have no momentum or decay, and a round has any number of
    clients: the generator's gradient is their mean, an embedding's its own. The printed algorithm subtracts the
    pull-back of new minus old, which climbs; here it is old minus new. The generator starts so that models start near
    where the task's do.
    """
    number("momentum", momentum, 0, 1)
    number("weight_decay", weight_decay, low=0)

    def decayed(lr: Any) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum))

    client = train(lr, **local)
    return compose(
        task,
        layout=shared_or_refused(by_role(personal=personal, statistics=statistics), task),
        client=client,
        aggregator=hypernetwork(
            client,
            generator=mlp(hidden),
            optimizer=decayed(server_lr),
            embedding_optimizer=decayed(embedding_lr),
            embedding=embedding,
            newcomer_rounds=newcomer_rounds,
        ),
        newcomer=train(lr, roles="personal", **for_epochs(newcomer_epochs, local)),
    )
