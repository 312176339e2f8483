"""Local hypernetworks: a small network generates part of the client's model."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.checks import one_of
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.generators import CODE_LEAF, GENERATOR_LEAVES, generated, mlp
from fedjax_pers.layouts import LayoutMaker, Statistics, by_role
from fedjax_pers.local import for_epochs, phases, train
from fedjax_pers.paths import SelectorLike
from fedjax_pers.presets import head

_PAPER = (
    'this package; after Ha, Dai, Le, "HyperNetworks", ICLR 2017, arXiv:1609.09106, and Shamsian et al., '
    '"Personalized Federated Learning using Hypernetworks", ICML 2021, arXiv:2103.04628'
)


@register(
    "private_generator",
    title="Private generator",
    paper=_PAPER,
    family="hypernetwork",
    personal="the network that generates the head",
    reduction="a network that ignores its code: FedPer; a linear one: FedSim, personal_lr times 1 + squared code",
)
def private_generator(
    task: Task,
    *,
    lr: float = 0.1,
    personal_lr: float = 0.1,
    on: SelectorLike = head(1),
    hidden: tuple[int, ...] = (),
    code: int = 8,
    training: str = "joint",
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """A network of the client's own makes its head, ``G_i = h_i(z)``, from a code that is one for all and stays.

    The rest of the model is averaged; the network never leaves, and what it makes is stored nowhere. A step of plain
    SGD on a linear network, ``G = z K + b``, moves G by ``1 + |z|^2`` times a step on G itself: without hidden layers
    this is FedSim with a ``personal_lr`` about ``1 + code`` times as large.

    Args:
      task: model and loss.
      lr: step size of what is shared.
      personal_lr: step size of the network.
      on: the leaves that are generated.
      hidden: widths of the network's hidden layers.
      code: numbers in the code.
      training: ``"joint"``, or ``"alternating"``: first the network, then what is shared.
      newcomer_epochs: passes over its data that an unseen client trains its network for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: there is no paper of this method; the network is the client's, not the server's.
    """
    layout = by_role(personal=GENERATOR_LEAVES, frozen=CODE_LEAF, statistics=statistics)
    rates = {"shared": lr, "personal": personal_lr}
    return _composed(task, on, hidden, code, layout, rates, training, newcomer_epochs, weights, local)


@register(
    "shared_generator",
    title="Shared generator, personal codes",
    paper=_PAPER,
    family="hypernetwork",
    personal="a code of a few numbers",
    reduction="equal codes that stay: FedAvg of the body and the network",
)
def shared_generator(
    task: Task,
    *,
    lr: float = 0.1,
    personal_lr: float = 0.1,
    on: SelectorLike = head(1),
    hidden: tuple[int, ...] = (32,),
    code: int = 8,
    training: str = "joint",
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """One network for all makes each client's head, ``G_i = h(z_i)``, from the client's own code, which never leaves.

    Body and network are averaged; a client is a handful of numbers, and a new one fits only those.

    Args:
      task: model and loss.
      lr: step size of what is shared, the network among it.
      personal_lr: step size of codes.
      on: the leaves that are generated.
      hidden: widths of the network's hidden layers.
      code: numbers in a code; all clients start from the same.
      training: ``"joint"``, or ``"alternating"``: first the code, then what is shared.
      newcomer_epochs: passes over its data that an unseen client fits its code for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: there is no paper of this method; clients hold codes and network, where pFedHN's server
    does.
    """
    layout = by_role(personal=CODE_LEAF, statistics=statistics)
    rates = {"shared": lr, "personal": personal_lr}
    return _composed(task, on, hidden, code, layout, rates, training, newcomer_epochs, weights, local)


def _composed(
    task: Task,
    on: SelectorLike,
    hidden: tuple[int, ...],
    code: int,
    layout: LayoutMaker,
    rates: dict[str, Any],
    training: str,
    newcomer_epochs: int,
    weights: str,
    local: dict[str, Any],
) -> Algorithm:
    one_of("training", training, ("joint", "alternating"))
    clients = {
        "joint": train(rates, **local),
        "alternating": phases(
            train(rates["personal"], roles="personal", order="personal", **local),
            train(rates["shared"], roles="shared", **local),
        ),
    }
    return compose(
        generated(task, on, generator=mlp(hidden), code=code),
        layout=layout,
        client=clients[training],
        aggregator=mean(weights=weights),
        newcomer=train(rates["personal"], roles="personal", **for_epochs(newcomer_epochs, local)),
    )
