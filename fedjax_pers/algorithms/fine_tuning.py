"""FedAvg, after which each client fine-tunes a copy: as it is, until it stops helping, or held to where it began."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.fisher import with_fisher
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import ClientUpdate, of_fine_tuning, train
from fedjax_pers.objectives import add, distillation, ewc, l2_sp, require_classes, task_loss
from fedjax_pers.paths import SelectorLike, everything, nothing
from fedjax_pers.tuning import fine_tune

_STUDY = 'Yu, Bagdasaryan, Shmatikov, "Salvaging Federated Learning by Local Adaptation", 2020, arXiv:2002.04758'
_PERSONAL = "nothing between rounds; every client fine-tunes a copy before it predicts"


@register(
    "fedavg_ft",
    title="FedAvg + fine-tuning",
    paper=_STUDY,
    family="baseline",
    personal=_PERSONAL,
    reduction="tune_epochs = 0: FedAvg",
)
def fedavg_ft(
    task: Task,
    *,
    lr: float = 0.1,
    tune_lr: float = 0.1,
    tune_epochs: int = 5,
    tune: SelectorLike = everything,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg; each client then trains a copy of the global model on its own training data before it predicts.

    Args:
      task: model and loss.
      lr: step size of the clients in training.
      tune_lr: step size of fine-tuning.
      tune_epochs: passes of fine-tuning; 0 gives the global model.
      tune: the leaves that are fine-tuned, for instance ``head(1)``.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the number of epochs is one setting for all clients, chosen on validation data.
    """
    adapt = train(tune_lr, epochs=tune_epochs, leaves=tune, **of_fine_tuning(local))
    return _fedavg(task, adapt, lr, weights, statistics, local)


@register(
    "fedavg_ft_early",
    title="FedAvg + fine-tuning, stopped early",
    paper=_STUDY + '; Prechelt, "Early Stopping, But When?", in: Neural Networks: Tricks of the Trade, Springer 1998',
    family="baseline",
    personal=_PERSONAL,
    reduction="tune_epochs = 0, or no epoch helps on the examples held back: FedAvg",
)
def fedavg_ft_early(
    task: Task,
    *,
    lr: float = 0.1,
    tune_lr: float = 0.1,
    tune_epochs: int = 10,
    holdout: float = 0.2,
    tune: SelectorLike = everything,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg + fine-tuning in which each client keeps the epoch that is best on examples which it holds back.

    Args:
      task: model and loss; ``"loss"`` is among its metrics.
      lr: step size of the clients in training, for which they use all their training examples.
      tune_lr: step size of fine-tuning.
      tune_epochs: passes of fine-tuning at most; a client may keep the global model.
      holdout: share of its training examples that a client judges on, in 0 .. 1; at least one where it has two.
      tune: the leaves that are fine-tuned.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the paper fine-tunes for a fixed number of epochs. The global model has seen the
    examples held back in federated training, so that their loss is a little in its favour.
    """
    adapt = fine_tune(tune_lr, epochs=tune_epochs, holdout=holdout, leaves=tune, **of_fine_tuning(local))
    return _fedavg(task, adapt, lr, weights, statistics, local)


@register(
    "fedavg_l2sp",
    title="FedAvg + L2-SP",
    paper='Li, Grandvalet, Davoine, "Explicit Inductive Bias for Transfer Learning with Convolutional Networks", '
    "ICML 2018, arXiv:1802.01483",
    family="regularised",
    personal=_PERSONAL,
    reduction="strength = 0: FedAvg + fine-tuning; tune_epochs = 0: FedAvg",
)
def fedavg_l2sp(
    task: Task,
    *,
    lr: float = 0.1,
    tune_lr: float = 0.1,
    tune_epochs: int = 5,
    strength: float = 0.1,
    new_strength: float = 0.0,
    new: SelectorLike = nothing,
    tune: SelectorLike = everything,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg + fine-tuning of ``f_i(x) + strength/2 |x_S - w_S|^2 + new_strength/2 |x_new|^2``, w the global model.

    Args:
      task: model and loss.
      lr: step size of the clients in training.
      tune_lr: step size of fine-tuning; ``tune_lr * strength`` must stay below 2.
      tune_epochs: passes of fine-tuning.
      strength: of the pull to the global model, at least 0.
      new_strength: of the pull of ``new`` leaves to 0, at least 0.
      new: leaves that federated training has left without a value worth keeping.
      tune: the leaves that are fine-tuned.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the start is the federation's global model, in which no layer is new by default.
    """
    objective = add(task_loss(), l2_sp(strength, new_strength, new=new))
    adapt = train(tune_lr, epochs=tune_epochs, leaves=tune, objective=objective, **of_fine_tuning(local))
    return _fedavg(task, adapt, lr, weights, statistics, local)


@register(
    "fedavg_ewc",
    title="FedAvg + EWC",
    paper='Kirkpatrick et al., "Overcoming Catastrophic Forgetting in Neural Networks", PNAS 2017, arXiv:1612.00796; '
    "in local adaptation of federated models: " + _STUDY,
    family="regularised",
    personal=_PERSONAL,
    reduction="strength = 0: FedAvg + fine-tuning; tune_epochs = 0: FedAvg",
)
def fedavg_ewc(
    task: Task,
    *,
    lr: float = 0.1,
    tune_lr: float = 0.1,
    tune_epochs: int = 5,
    strength: float = 1.0,
    labels: str = "predicted",
    tune: SelectorLike = everything,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg + fine-tuning of ``f_i(x) + strength/2 sum_j F_j (x_j - w_j)^2``, w the global model.

    ``F_j`` is the mean over the client's training examples of ``sum_y p(y|x) (d_j log p(y|x))^2`` at w.

    Args:
      task: a classification task with one label an example, ``apply`` and a criterion that is ``-log p(y | x)``.
      lr: step size of the clients in training.
      tune_lr: step size of fine-tuning; ``tune_lr * strength * F_j`` must stay below 2.
      tune_epochs: passes of fine-tuning.
      strength: of the pull to the global model, at least 0.
      labels: ``"predicted"``, the expectation above, or ``"observed"``, with the examples' own labels.
      tune: the leaves that are fine-tuned.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: F is of the client's own examples, since those of others are not there.
    """
    require_classes(task, "EWC")
    schedule = of_fine_tuning(local)

    def held(fisher: Any) -> ClientUpdate:
        objective = add(task_loss(), ewc(strength, fisher))
        return train(tune_lr, epochs=tune_epochs, leaves=tune, objective=objective, **schedule)

    held({})  # what can be wrong with the settings is so before any work
    return _fedavg(task, with_fisher(held, leaves=tune, labels=labels), lr, weights, statistics, local)


@register(
    "fedavg_kd",
    title="FedAvg + distillation",
    paper='Li, Hoiem, "Learning without Forgetting", ECCV 2016, arXiv:1606.09282; in local adaptation of federated '
    "models: " + _STUDY,
    family="regularised",
    personal=_PERSONAL,
    reduction="strength = 0: FedAvg + fine-tuning; tune_epochs = 0: FedAvg",
)
def fedavg_kd(
    task: Task,
    *,
    lr: float = 0.1,
    tune_lr: float = 0.1,
    tune_epochs: int = 5,
    strength: float = 1.0,
    temperature: float = 2.0,
    tune: SelectorLike = everything,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg + fine-tuning of ``f_i(x) + strength T^2 KL(softmax(z^w / T) || softmax(z / T))``, z^w the global outputs.

    Args:
      task: a classification task with ``apply`` and a score for each class.
      lr: step size of the clients in training.
      tune_lr: step size of fine-tuning.
      tune_epochs: passes of fine-tuning.
      strength: of the pull to the global model's predictions, at least 0.
      temperature: T, above 0.
      tune: the leaves that are fine-tuned.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: there is one task, and the old outputs are the global model's on the client's examples;
    the loss of the labels has weight 1.
    """
    require_classes(task, "distillation")
    objective = add(task_loss(), distillation(strength, temperature))
    adapt = train(tune_lr, epochs=tune_epochs, leaves=tune, objective=objective, **of_fine_tuning(local))
    return _fedavg(task, adapt, lr, weights, statistics, local)


def _fedavg(
    task: Task, adapt: ClientUpdate, lr: Any, weights: str, statistics: Statistics, local: dict[str, Any]
) -> Algorithm:
    layout, client, aggregator = by_role(statistics=statistics), train(lr, **local), mean(weights=weights)
    return compose(task, layout=layout, client=client, aggregator=aggregator, adapt=adapt)
