"""Fine-tuning as a last phase of a whole method, put behind it or taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from fedjax_pers.base import Array, Cohort, Parts, State, Task
from fedjax_pers.compose import Algorithm, Item, Recipe, fine_tuned, items_of
from fedjax_pers.executors.default import default_executor
from fedjax_pers.executors.lanes import map_reduce, padding
from fedjax_pers.keys import as_key
from fedjax_pers.layouts import by_role
from fedjax_pers.local import ClientUpdate
from fedjax_pers.paths import everything
from fedjax_pers.trees import entry


def with_adaptation(algorithm: Algorithm, adapt: ClientUpdate) -> Algorithm:
    """The same method, each of whose clients fine-tunes the model that it predicts with, on its own training data.

    Training, what is sent and what is kept do not change; nothing is written back. ``compose(adapt=...)`` is the same
    for a method made of parts. A method that fine-tunes already does so first.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "linear")
      >>> ifca = fp.method("ifca").make(task, clusters=3)
      >>> tuned = with_adaptation(ifca, fp.fine_tune(0.1, leaves=fp.head(1)))

    Args:
      algorithm: any whose models have the leaves of its task.
      adapt: a client update, such as :func:`~fedjax_pers.fine_tune` or :func:`~fedjax_pers.train`. All leaves are the
        client's own there.
    """
    alone = by_role(personal=everything)(algorithm.task)

    def personalize(state: State, cohort: Cohort, key: Array | int) -> Any:
        chosen = algorithm.executor or default_executor((state.shared, state.fresh, state.frozen))
        count = cohort.ids.shape[0]
        extra = padding(chosen, count)
        items = items_of(state, cohort, as_key(key), "personalize", extra)
        models = entry(algorithm.personalize(state, cohort, key), jnp.minimum(jnp.arange(count + extra), count - 1))

        def one(common: tuple[State, Cohort], client: tuple[Item, Any]) -> tuple[tuple, Any]:
            item, variables = client
            context = item.context(common[1], common[0], Parts({}, {}, {}))
            return (), fine_tuned(adapt, alone, variables, context)

        _, tuned = map_reduce(chosen, one, (state._replace(rows={}), cohort), (items, models), items.size)
        return entry(tuned, slice(count))

    return algorithm._replace(
        personalize=personalize,
        unadapted=algorithm.unadapted or algorithm.personalize,
        recipe=_recipe(algorithm, with_adaptation, adapt),
    )


def without_adaptation(algorithm: Algorithm) -> Algorithm:
    """The same method, whose clients predict with what they have before they fine-tune; itself where they never do."""
    if algorithm.unadapted is None:
        return algorithm
    recipe = _recipe(algorithm, without_adaptation)
    return algorithm._replace(personalize=algorithm.unadapted, unadapted=None, recipe=recipe)


class _Changed(NamedTuple):
    """A factory whose algorithms are changed; of equal parts equal, so that compiled programs are found again."""

    factory: Callable[..., Algorithm]
    change: Callable[..., Algorithm]
    options: tuple[Any, ...]

    def __call__(self, task: Task, **settings: Any) -> Algorithm:
        return self.change(self.factory(task, **settings), *self.options)


def _recipe(algorithm: Algorithm, change: Callable[..., Algorithm], *options: Any) -> Recipe | None:
    recipe = algorithm.recipe
    return recipe and recipe._replace(factory=_Changed(recipe.factory, change, options))
