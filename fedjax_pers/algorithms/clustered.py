"""Clustered methods: a model for each group of clients."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import grouping, splitting
from fedjax_pers.aggregators.clustered import hypotheses
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.checks import require
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role, shared_or_refused, shared_shapes
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import SelectorLike, as_selector, everything, nothing


@register(
    "ifca",
    title="IFCA",
    paper='Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, '
    "arXiv:2006.04088",
    family="clustered",
    personal="nothing, or any chosen leaves",
    reduction="clusters = 1: FedAvg",
    secure_aggregation=False,
)
def ifca(
    task: Task,
    *,
    lr: float = 0.1,
    clusters: int = 2,
    clustered: SelectorLike = everything,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Several models; each client trains the one with the least loss on its training data.

    ``j_i = argmin_j f_i(w_j)``; each model is the mean of those who chose it, one that nobody chose stays. All models
    travel down, one travels up. Unseen clients choose likewise.

    Args:
      task: model and loss.
      lr: step size.
      clusters: number of models, which start from as many random initialisations.
      clustered: shared leaves of which each cluster has its own; all others are averaged over everyone (``head(1)``:
        the paper's weight sharing).
      personal: leaves that stay with the client (clustered FedPer).
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: within a cluster, as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: model averaging only (no gradient averaging), and clients count by their examples unless
    ``weights="uniform"``. Clusters can collapse, as there: look at ``state.aux["counts"]``.
    """
    layout = shared_or_refused(by_role(personal=personal, statistics=statistics), task)
    bound = layout(task)
    shared = shared_shapes(bound)
    chosen = as_selector(clustered).select(shared, bound.model)
    require(bool(chosen), f"clustered: {as_selector(clustered)} selects none of the shared leaves {sorted(shared)}")
    newcomer = train(lr, **for_epochs(newcomer_epochs, local), roles="personal")
    return compose(
        task,
        layout=layout,
        client=train(lr, **local),
        aggregator=hypotheses(clusters, weights=weights, common=set(shared) - chosen),
        newcomer=newcomer,
    )


@register(
    "cfl",
    title="CFL",
    paper='Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization '
    'Under Privacy Constraints", IEEE TNNLS 2021, arXiv:1910.01991',
    family="clustered",
    personal="nothing, or any chosen leaves",
    reduction="eps1 = 0: FedAvg with uniform weights",
    secure_aggregation=False,
)
def cfl(
    task: Task,
    *,
    lr: float = 0.1,
    eps1: float = 0.4,
    eps2: float = 1.6,
    warm_up: int = 20,
    most: int = 8,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg in clusters that are cut in two where they are at rest while some member is not.

    A cluster of more than two clients, all of whom took part, is split when ``|mean D_i| < eps1`` and
    ``max |D_i| > eps2``: the largest cosine similarity across its parts is made small. Both parts go on from the same
    model. An unseen client takes the cluster whose model has the least loss on its training data.

    Args:
      task: model and loss.
      lr: step size.
      eps1: norm of the mean difference below which a cluster is at rest; scales with model and step size.
      eps2: norm of a difference above which a member is not.
      warm_up: rounds before the first split.
      most: clusters that there may be.
      personal: leaves that stay; similarity is of the shared ones alone.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name; norms and cosines leave them out.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: a split is not tested against the estimated gradient noise (``gamma_max``); complete
    linkage stands for the best bipartition; new clients choose by loss, not by the stored directions of splits.
    """
    return compose(
        task,
        layout=shared_or_refused(by_role(personal=personal, statistics=statistics), task),
        client=train(lr, **local),
        aggregator=splitting.cfl(eps1, eps2, warm_up, most),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local), roles="personal"),
    )


@register(
    "fl_hc",
    title="FL+HC",
    paper='Briggs, Fan, Andras, "Federated Learning with Hierarchical Clustering of Local Updates to Improve Training '
    'on Non-IID Data", IJCNN 2020, arXiv:2004.11791',
    family="clustered",
    personal="nothing, or any chosen leaves",
    reduction="a distance above all: FedAvg; distance = 0: local training after the first rounds",
    secure_aggregation=False,
)
def fl_hc(
    task: Task,
    *,
    lr: float = 0.1,
    at: int = 10,
    distance: float = 1.0,
    metric: splitting.Metric = "euclidean",
    linkage: splitting.Linkage = "ward",
    most: int = 8,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg for some rounds; then clients are clustered once by their updates, and each cluster goes on by itself.

    Args:
      task: model and loss.
      lr: step size.
      at: rounds of FedAvg before the one in which clusters are made, in which everybody should take part.
      distance: at which the tree is cut; scales with model and step size.
      metric: between differences, ``"euclidean"``, ``"cityblock"`` or ``"cosine"``.
      linkage: ``"single"``, ``"complete"``, ``"average"`` or ``"ward"`` (Euclidean only).
      most: clusters that there may be; the tree is cut higher where it would be more.
      personal: leaves that stay; distances are of the shared ones alone.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: within a cluster, as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name; distances leave them out.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: a client that is absent in the round of the clustering stays in the first cluster; new
    clients choose by loss.
    """
    return compose(
        task,
        layout=shared_or_refused(by_role(personal=personal, statistics=statistics), task),
        client=train(lr, **local),
        aggregator=splitting.hierarchical(at, distance, metric, linkage, most, weights=weights),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local), roles="personal"),
    )


@register(
    "fedgroup",
    title="FedGroup",
    paper='Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: Efficient Clustered Federated Learning via Decomposed '
    'Data-Driven Measure", 2020, arXiv:2010.06870; FlexCFL, IEEE TPDS 2022, arXiv:2108.09749',
    family="clustered",
    personal="nothing, or any chosen leaves",
    reduction="groups = 1: FedAvg, from the cold start on",
    secure_aggregation=False,
)
def fedgroup(
    task: Task,
    *,
    lr: float = 0.1,
    groups: int = 2,
    mixing: float = 0.0,
    embedding: grouping.Embedding = "edc",
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The clients of the first round are grouped by their updates; later ones join the group of their direction.

    Cold start: ``E_ij = cos(D_i, v_j)`` to the first right singular vectors of the differences, k-means++ on ``E``;
    each group goes on from its members' mean. A client that comes later trains the first model once, joins
    ``argmax_g cos(D_i, mean difference of g)``, and counts from its next round on. Groups are drawn to each other:
    ``w_g <- (w_g + mixing sum_h w_h / |w_h|) / (1 + mixing sum_h 1 / |w_h|)`` over the others.

    Args:
      task: model and loss.
      lr: step size.
      groups: how many; a round needs as many clients for the cold start.
      mixing: the paper's ``eta_G``, between groups; 0 keeps them apart, the paper has up to 0.1.
      embedding: what k-means sees, ``"edc"`` (cosines, as above) or ``"differences"`` themselves.
      personal: leaves that stay; directions are of the shared ones alone.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: within a group, as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name; directions leave them out.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the cold start is the first round with enough clients, and trains no longer than any
    other (there: twenty clients for each group, 50 steps); a later client's first round decides its group and no more
    (there it trains the group's model in the same round); a client that predicts and was in no round has no update: it
    takes the model with the least loss. Groups stay as they are (FlexCFL moves clients whose data have changed).
    """
    return compose(
        task,
        layout=shared_or_refused(by_role(personal=personal, statistics=statistics), task),
        client=train(lr, **local),
        aggregator=grouping.fedgroup(groups, mixing, embedding, weights=weights),
        at_least=groups,
        newcomer=train(lr, **for_epochs(newcomer_epochs, local), roles="personal"),
    )
