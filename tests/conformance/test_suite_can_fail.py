"""The suite finds what it is there to find: methods that are broken on purpose, each in one way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fedjax_pers as fp
from fedjax_pers import testing
from fedjax_pers.trees import gather_rows

EXAMPLE = (("x", (3,), "float32"), ("y", (), "int32"))


@pytest.fixture(scope="module")
def task():
    return fp.tasks.from_model(EXAMPLE, "linear", num_classes=2)


def fails(check, factory, task, **settings):
    with pytest.raises(AssertionError) as error:
        check(testing.subject_for(factory, task, **settings))
    return str(error.value)


def wrapped(step_of):
    def factory(task, *, lr=0.1):
        algorithm = fp.compose(task, layout=fp.by_role(personal="bias"), client=fp.train(lr, batch_size=4))
        return algorithm._replace(step=step_of(algorithm))

    return factory


def test_a_state_that_changes_its_dtype(task):
    def step_of(algorithm):
        def step(state, cohort, key):
            state, metrics = algorithm.step(state, cohort, key)
            return state._replace(round=state.round.astype(jnp.float32)), metrics

        return step

    assert "tree" in fails(testing.same_structure, wrapped(step_of), task)


def test_absent_clients_that_are_touched(task):
    def step_of(algorithm):
        def step(state, cohort, key):
            state, metrics = algorithm.step(state, cohort, key)
            return state._replace(rows=jax.tree.map(lambda x: x * 1.0001 + 1e-6, state.rows)), metrics

        return step

    assert "rows of clients" in fails(testing.absent_rows, wrapped(step_of), task)


def test_keys_by_place_in_the_cohort(task):
    def step_of(algorithm):
        def step(state, cohort, key):
            return algorithm.step(state, cohort._replace(tags=jnp.arange(len(cohort.ids), dtype=jnp.uint32)), key)

        return step

    assert "another order" in fails(testing.order, wrapped(step_of), task)


def test_padding_that_writes_to_the_last_client(task):
    def step_of(algorithm):
        def step(state, cohort, key):
            after, metrics = algorithm.step(state, cohort, key)
            last = gather_rows(after.rows, jnp.array([testing.CLIENTS - 1]), after.fresh)
            pads = (~cohort.valid).sum()
            return after._replace(rows=jax.tree.map(lambda x, r: x.at[-1].set(r[0] + pads), after.rows, last)), metrics

        return step

    fails(testing.executors_and_padding, wrapped(step_of), task)


def test_a_personal_leaf_in_the_upload(task):
    def factory(task, *, lr=0.1):
        algorithm = fp.compose(task, layout=fp.by_role(personal="bias"), client=fp.train(lr, batch_size=4))

        def exchange(state, cohort, key, tamper=lambda row: row):
            download, upload, row = algorithm.exchange(state, cohort, key, tamper)
            return download, {**upload, **row}, row

        return algorithm._replace(exchange=exchange)

    assert "personal leaves in the upload" in fails(testing.firewall, factory, task)


def test_an_upload_computed_from_personal_leaves(task):
    def factory(task, *, lr=0.1):
        algorithm = fp.compose(task, layout=fp.by_role(personal="bias"), client=fp.train(lr, batch_size=4))

        def exchange(state, cohort, key, tamper=lambda row: row):
            download, upload, row = algorithm.exchange(state, cohort, key, tamper)
            leak = sum(x.sum() for x in row.values())
            return download, {name: x + 0 * leak for name, x in upload.items()}, row

        return algorithm._replace(exchange=exchange)

    assert "when personal leaves are NaN" in fails(testing.firewall, factory, task)


def test_a_setting_that_python_branches_on(task):
    def factory(task, *, lr=0.1):
        return fp.compose(task, client=fp.train(lr if lr > 0.01 else 0.01, batch_size=4))

    with pytest.raises(jax.errors.TracerBoolConversionError):
        testing.vectorises(testing.subject_for(factory, task))


def test_personalize_that_depends_on_its_neighbours(task):
    def factory(task, *, lr=0.1):
        algorithm = fp.compose(task, client=fp.train(lr, batch_size=4))

        def personalize(state, cohort, key):
            models = algorithm.personalize(state, cohort, key)
            return jax.tree.map(lambda x: x - x.mean(0) + cohort.ids[0], models)

        return algorithm._replace(personalize=personalize)

    assert "personalize for fewer clients" in fails(testing.personalises, factory, task)


def test_check_algorithm_names_the_check(task):
    def step_of(algorithm):
        return lambda state, cohort, key: (algorithm.step(state, cohort, key)[0], None)

    with pytest.raises((AssertionError, AttributeError)):
        testing.check_algorithm(wrapped(step_of), task)
