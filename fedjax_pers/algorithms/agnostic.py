"""Methods that look after the clients which are worst off: AFL, AgnosticFedAvg, q-FFL, TERM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedjax_pers.aggregators.agnostic import Ascent, fair, minimax, tilted
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import ClientUpdate, for_epochs, full_step, train
from fedjax_pers.paths import SelectorLike, nothing

_FAMILY = {
    "family": "agnostic",
    "personal": "nothing, or any chosen leaves: the losses are then of personalised models",
}


def _newcomer(lr: Any, newcomer_epochs: int, local: dict[str, Any]) -> ClientUpdate:
    return train(lr, **for_epochs(newcomer_epochs, local), roles="personal")


@register(
    "afl",
    title="AFL",
    paper='Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019, arXiv:1902.00146',
    reduction="ascent_lr = 0: uniform FedSGD (the mean of its iterates)",
    secure_aggregation=False,  # the server sees each loss
    **_FAMILY,
)
def afl(
    task: Task,
    *,
    lr: float = 0.1,
    ascent_lr: float = 0.1,
    ascent: Ascent = "projected",
    domains: Sequence[int] = (),
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    batch_size: int = 32,
) -> Algorithm:
    """The model that is best for the worst mixture of domains: ``min_w max_lambda sum_k lambda_k f_k(w)``.

    In every round all clients send one full gradient and the loss at the model that they received. At the same time
    ``w <- w - lr sum_k lambda_k grad f_k(w)`` and ``lambda <- project(lambda + ascent_lr f(w))``, or
    ``lambda_k <- lambda_k exp(ascent_lr f_k(w))``, normalised. What predicts is the mean of all iterates.

    Args:
      task: model and loss.
      lr: step size of the model.
      ascent_lr: step size of the weights, at least 0.
      ascent: ``"projected"`` gradient or ``"exponentiated"`` gradient.
      domains: the domain of every client, ``0 .. domains - 1``; each client is its own by default.
      personal: leaves that stay; the client steps along their own gradient, not weighted, at the same time.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      batch_size: examples at once; it changes the memory that is needed, not the result.

    Differences from the paper: gradients are of all examples of a client, not of a sample; losses are taken in
    evaluation mode.
    """
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=full_step(lr, batch_size=batch_size),
        aggregator=minimax(ascent_lr, ascent=ascent, domains=domains or None),
        newcomer=_newcomer(lr, newcomer_epochs, {"batch_size": batch_size}),
        participation="everyone",
    )


@register(
    "agnostic_fedavg",
    title="AgnosticFedAvg",
    paper='Ro, Chen, Mathews, Mohri, Suresh, "Communication-Efficient Agnostic Federated Averaging", 2021, '
    "arXiv:2104.02748",
    reduction="ascent_lr = 0, one client in each domain: uniform FedAvg (the mean of its iterates)",
    secure_aggregation=False,  # the server sees each loss
    **_FAMILY,
)
def agnostic_fedavg(
    task: Task,
    *,
    lr: float = 0.1,
    ascent_lr: float = 0.1,
    domains: Sequence[int] = (),
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """AFL with local training and any cohort: domains weigh ``lambda_k``, which rises as ``exp(ascent_lr f_k)``.

    Within a domain the clients of the round count by their examples. Weights of domains without a client in the round
    keep their share of the whole.

    Args:
      task: model and loss.
      lr: step size of the clients.
      ascent_lr: step size of the weights, at least 0.
      domains: the domain of every client, ``0 .. domains - 1``; each client is its own by default.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: a client belongs to one domain (the paper has domains of examples); a domain's examples
    are counted in the round, not over a window of rounds; what predicts is the mean of all iterates.
    """
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=train(lr, **local),
        aggregator=minimax(ascent_lr, ascent="exponentiated", domains=domains or None),
        newcomer=_newcomer(lr, newcomer_epochs, local),
    )


@register(
    "qffl",
    title="q-FFL",
    paper='Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv:1905.10497',
    reduction="q = 0: FedAvg with uniform weights",
    **_FAMILY,
)
def qffl(
    task: Task,
    *,
    lr: float = 0.1,
    q: float = 1.0,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """q-FedAvg on ``sum_k f_k^(q+1) / (q+1)``: clients with a high loss count more, the more so the larger q is.

    ``w <- w - sum_k F_k^q D_k / sum_k (q F_k^(q-1) |D_k|^2 + F_k^q / lr)``, ``D_k = (w - w_k) / lr``, ``F_k`` the loss
    of client k at the model it received, over all its training examples.

    Args:
      task: model and loss.
      lr: step size of the clients, above 0; its inverse stands for the Lipschitz constant.
      q: at least 0.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    A cohort of a given size is drawn in proportion to the clients' examples, since the sums above are plain ones.

    Differences from the paper: clients are drawn without replacement.
    """
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=train(lr, **local),
        aggregator=fair(q, lr),
        newcomer=_newcomer(lr, newcomer_epochs, local),
        sampling="examples",
    )


@register(
    "term",
    title="TERM",
    paper='Li, Beirami, Sanjabi, Smith, "Tilted Empirical Risk Minimization", ICLR 2021, arXiv:2007.01162',
    reduction="t = 0: FedAvg",
    secure_aggregation=False,  # the server sees each loss
    **_FAMILY,
)
def term(
    task: Task,
    *,
    lr: float = 0.1,
    t: float = 1.0,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg with weights ``p_k exp(t f_k)``, ``f_k`` being the loss of client k at the model it received.

    The fixed points are those of the tilted risk ``log(sum_k p_k exp(t f_k)) / t``.

    Args:
      task: model and loss.
      lr: step size of the clients.
      t: the tilt; 0 is the mean, a large one the worst client, a negative one is robust against it.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: ``p_k``, as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: clients are tilted, not examples (the paper's hierarchical tilting with an inner tilt of
    0); losses are exact, those of the round, not running estimates.
    """
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=train(lr, **local),
        aggregator=tilted(t, weights=weights),
        newcomer=_newcomer(lr, newcomer_epochs, local),
    )
