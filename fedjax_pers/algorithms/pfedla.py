"""pFedLA: layer by layer, each client's own mixture of all clients' models."""

from __future__ import annotations

from typing import Any

import optax

from fedjax_pers.aggregators import layer_weights
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.generators import mlp
from fedjax_pers.layouts import Statistics, by_role, shared_or_refused, shared_shapes
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import SelectorLike, nothing
from fedjax_pers.presets import layers


@register(
    "pfedla",
    title="pFedLA",
    paper='Ma, Zhang, Guo, Xu, "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022, '
    "arXiv:2205.03993",
    family="conditional",
    personal="what you choose; the server keeps every client's model, weights by layer and embedding",
    reduction="weights that stay equal: the mean of all clients' last models",
    secure_aggregation=False,
)
def pfedla(
    task: Task,
    *,
    lr: float = 0.1,
    weights_lr: float = 0.01,
    hidden: tuple[int, ...] = (32,),
    embedding: int = 8,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Client i receives ``sum_j alpha_ilj w_jl`` of layer l; a network of its own on the server learns the weights.

    ``alpha_il = softmax(h_i(v_i)_l)``. The network takes a step along the pull-back of what training took from the
    received model (old minus new). The server keeps all models: meant for some tens of clients.

    Args:
      task: model and loss.
      lr: step size of the clients.
      weights_lr: step size of networks and embeddings.
      hidden: widths of the networks' hidden layers.
      embedding: numbers in an embedding.
      personal: leaves that stay; only the others are mixed.
      newcomer_epochs: passes over its data that an unseen client trains for before it predicts, from the mean model.
      statistics: treatment of running statistics that ``personal`` does not name; shared ones are mixed as one more
        layer.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: any cohort may take part in a round, others' last models being used; one network gives
    the weights of all layers of a client, from one embedding.
    """
    make = shared_or_refused(by_role(personal=personal, statistics=statistics), task)
    layout = make(task)
    shared = {name: x for name, x in shared_shapes(layout).items() if name in layout.trainable}
    groups = tuple(tuple(sorted(names)) for names in layers(shared, layout.model).values())
    return compose(
        task,
        layout=make,
        client=train(lr, **local),
        aggregator=layer_weights(groups, generator=mlp(hidden), embedding=embedding, optimizer=optax.sgd(weights_lr)),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local)),
    )
