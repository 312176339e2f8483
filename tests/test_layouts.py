"""Which leaves are shared, personal and frozen, over all collections and libraries; bytes counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import fedjax_pers as fp
from fedjax_pers.layouts import leaves_of, replace, trainable_leaves, without
from fedjax_pers.paths import as_selector
from tests import toys
from tests.tasks.conftest import normed

# Normalisation `odd` of 3 features and a linear `head` to 5 classes, in each library. Bytes of every leaf:
AFFINE = {
    "linen": {"params/odd/scale": 12, "params/odd/bias": 12},
    "nnx": {"params/odd/scale": 12, "params/odd/bias": 12},
    "equinox": {"params/odd/weight": 12, "params/odd/bias": 12},
    "haiku": {"params/odd/scale": 12, "params/odd/offset": 12},
    "plain": {},
}
HEAD = {
    "linen": {"params/head/kernel": 60, "params/head/bias": 20},
    "nnx": {"params/head/kernel": 60, "params/head/bias": 20},
    "equinox": {"params/head/weight": 60, "params/head/bias": 20},
    "haiku": {"params/head/w": 60, "params/head/b": 20},
    "plain": {"head/w": 60, "head/b": 20},
}
STATISTICS = {
    "linen": {"batch_stats/odd/mean": 12, "batch_stats/odd/var": 12},
    "nnx": {"batch_stats/odd/mean": 12, "batch_stats/odd/var": 12},
    "equinox": {"state/0": 1, "state/1/0": 12, "state/1/1": 12},
    "haiku": {
        f"state/odd/~/{average}/{name}": size
        for average in ("mean_ema", "var_ema")
        for name, size in (("average", 12), ("hidden", 12), ("counter", 4))
    },
    "plain": {"seen/mean": 12, "seen/batches": 4},
}
LIBRARIES = tuple(HEAD)


def plain():
    """A linear model in plain JAX that keeps the mean of its features and counts batches."""

    def init(key):
        return {
            "head": {"w": jnp.ones((3, 5)), "b": jnp.zeros(5)},
            "seen": {"mean": jnp.zeros(3), "batches": jnp.int32(0)},
        }

    def apply(variables, batch, key):
        outputs = (batch["x"] - variables["seen"]["mean"]) @ variables["head"]["w"] + variables["head"]["b"]
        tracked = {"mean": batch["x"].mean(axis=0), "batches": variables["seen"]["batches"] + 1}
        return outputs, {} if key is None else {"seen": tracked}

    example = (("x", (3,), "float32"), ("y", (), "int32"))
    return fp.tasks.supervised(init, apply, example=example, statistics=fp.parse("seen/**"))


def task_of(library):
    return plain() if library == "plain" else normed(library)


def sized(parts):
    return {role: {name: x.nbytes for name, x in getattr(parts, role).items()} for role in parts._fields}


def initial(maker, task):
    layout = maker(task)
    return layout, layout.init(task.init(jax.random.key(0)))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("statistics", "role"), [("average", "shared"), ("local", "personal"), ("ignore", "frozen")])
def test_roles_over_all_collections(library, statistics, role):
    layout, parts = initial(fp.by_role(personal="head", statistics=statistics), task_of(library))
    expected = {"shared": dict(AFFINE[library]), "personal": dict(HEAD[library]), "frozen": {}}
    expected[role].update(STATISTICS[library])
    assert sized(parts) == expected
    assert layout.trainable == set(AFFINE[library]) | set(HEAD[library])
    assert layout.common is None  # a server without a head has no whole model

    found = fp.describe(layout)
    totals = {role: sum(sizes.values()) for role, sizes in expected.items()}
    assert (found.shared, found.personal, found.frozen) == tuple(totals.values())
    assert found.uplink == pytest.approx(totals["shared"] / sum(totals.values()))
    rows = {(role, name): size for role, name, _, size in found.rows}
    assert rows == {(role, name): size for role, sizes in expected.items() for name, size in sizes.items()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_selector_that_names_statistics_goes_before_their_treatment(library):
    _, parts = initial(fp.by_role(personal=list(STATISTICS[library]), statistics="ignore"), task_of(library))
    assert set(parts.personal) == set(STATISTICS[library]) and parts.frozen == {}


@pytest.mark.parametrize("library", LIBRARIES)
def test_reading_gives_the_variables_back(library):
    task = task_of(library)
    variables = task.init(jax.random.key(3))
    for maker in (fp.by_role(personal=fp.bias()), fp.twin(), fp.twin(statistics="local"), fp.twin(statistics="ignore")):
        layout = maker(task)
        for view in layout.views.values():
            toys.same_bits(view.read(layout.init(variables)), variables)


@pytest.mark.parametrize("library", LIBRARIES)
def test_frozen_leaves_neither_train_nor_travel(library):
    layout, parts = initial(fp.by_role(frozen="head" if library != "plain" else "head/b"), task_of(library))
    frozen = set(HEAD[library]) if library != "plain" else {"head/b"}
    assert set(parts.frozen) == frozen
    assert frozen.isdisjoint(layout.trainable) and frozen.isdisjoint(parts.shared)
    assert layout.common == "model"


@pytest.mark.parametrize("library", LIBRARIES)
def test_twins(library):
    params, statistics = {**AFFINE[library], **HEAD[library]}, STATISTICS[library]

    def own(sizes):
        return {f"own/{name}": size for name, size in sizes.items()}

    _, parts = initial(fp.twin(), task_of(library))
    assert sized(parts) == {"shared": params | statistics, "personal": own(params | statistics), "frozen": {}}
    # Statistics that stay at home: neither model's travel.
    layout, parts = initial(fp.twin(statistics="local"), task_of(library))
    assert sized(parts) == {"shared": params, "personal": own(params | statistics) | statistics, "frozen": {}}
    assert layout.common is None
    # Statistics that nobody keeps are one and the same for both models.
    layout, parts = initial(fp.twin(statistics="ignore"), task_of(library))
    assert sized(parts) == {"shared": params, "personal": own(params), "frozen": statistics}
    assert layout.common == "shared"
    assert layout.trainable == set(params) | set(own(params))


@pytest.mark.parametrize("library", LIBRARIES)
def test_interpolation_mixes_parameters(library):
    layout, parts = initial(fp.interpolate(0.25), task_of(library))
    assert parts.personal["alpha"].dtype == jnp.float32 and "alpha" not in layout.trainable
    moved = replace(
        parts, {name: x + jnp.ones_like(x) for name, x in parts.personal.items() if name.startswith("own/")}
    )
    mixed = fp.flatten(layout.view("model").read(moved))
    for name, x in parts.shared.items():
        whole = not jnp.issubdtype(x.dtype, jnp.floating)
        expected = np.asarray(moved.personal[f"own/{name}"]) if whole else np.asarray(x) + 0.25
        np.testing.assert_allclose(mixed[name], expected, rtol=1e-6)


def test_tracked_leaves_of_each_view_go_to_their_own_place():
    layout, parts = initial(fp.twin(), plain())
    tracked = {"seen": {"mean": jnp.ones(3), "batches": jnp.int32(5)}}
    assert set(layout.view("shared").tracked(parts, tracked)) == {"seen/mean", "seen/batches"}
    assert set(layout.view("own").tracked(parts, tracked)) == {"own/seen/mean", "own/seen/batches"}
    layout, parts = initial(fp.twin(statistics="ignore"), plain())
    assert layout.view("own").tracked(parts, tracked) == {}


def test_a_second_model_does_not_make_the_upload_look_small():
    # Ditto sends what FedAvg sends: 43 parameters, the whole model.
    found = fp.describe(fp.twin()(toys.classifier()))
    assert (found.shared, found.personal, found.uplink) == (172, 172, 1.0)


def test_a_description_is_honest_about_the_head():
    # 4 -> 5 -> 3: hidden 20 + 5, head 15 + 3; the head is 18 of 43 parameters.
    layout = fp.by_role(personal=fp.head(1))(toys.classifier())
    found = fp.describe(layout)
    assert (found.shared, found.personal, found.frozen) == (100, 72, 0)
    assert found.uplink == pytest.approx(25 / 43)
    assert str(found) == "shared 100 B, personal 72 B, frozen 0 B; uplink 100 B a client and round, 58.14% of the model"
    assert fp.describe(layout, toys.classifier().init(jax.random.key(0))) == found
    console = Console(width=100)
    with console.capture() as shown:
        console.print(found)
    for text in ("params/hidden1/kernel", "4x5", "80", "personal", "58.14%"):
        assert text in shown.get()


def test_leaves_by_role():
    layout, parts = initial(fp.by_role(personal="seen/**", frozen="head/b"), plain())
    assert set(leaves_of(parts)) == {"head/w", "seen/mean", "seen/batches"}
    assert set(leaves_of(parts, "personal")) == {"seen/mean", "seen/batches"}
    assert trainable_leaves(layout, parts, "personal") == {}
    assert set(trainable_leaves(layout, parts)) == {"head/w"}


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (lambda: fp.by_role(personal="params/heads"), r"pattern params/heads matches no leaf; nearest: params/head"),
        (lambda: fp.by_role(frozen="params/hidden"), r"params/hidden matches no leaf; nearest: params/hidden1"),
        (
            lambda: fp.by_role(personal="params/head", frozen="**/kernel"),
            r"leaf 'params/head/kernel' is claimed by 'personal' and 'frozen'",
        ),
        (lambda: fp.by_role(frozen=fp.everything), r"frozen: everything leaves nothing that can be trained"),
        (lambda: fp.twin(frozen=fp.everything), r"frozen: everything leaves nothing that can be trained"),
        (lambda: fp.interpolate(0.5, frozen=fp.everything), r"frozen: everything leaves nothing that can be trained"),
        (
            lambda: fp.by_role(statistics="locl"),
            r"statistics: found 'locl'; allowed are \['average', 'ignore', 'local'\]",
        ),
        (lambda: fp.twin(statistics=None), r"statistics: found None"),
        (lambda: fp.by_role(personal=fp.head(3)), r"head\(3\): found 2 layers"),
        (lambda: fp.by_role(personal=len), r"selector: found the function .*wrap it, where\(len\)"),
    ],
)
def test_errors_name_what_was_found_and_what_is_allowed(maker, message):
    with pytest.raises(ValueError, match=message):
        maker()(toys.classifier())


def test_a_model_without_leaves():
    empty = fp.Task(lambda key: {}, None, None)
    with pytest.raises(ValueError, match="task: init returns no leaves"):
        fp.by_role()(empty)


def test_a_leaf_that_is_made_of_others_has_no_owner():
    task = toys.plain_task(lambda v, batch: v["w"] * batch["a"] + v["twice"], w=3.0, twice=0.0)
    layout = without(fp.by_role()(task), lambda leaves: {"twice": 2 * leaves["w"]})
    parts = layout.init(task.init(jax.random.key(0)))
    assert set(parts.shared) == layout.trainable == {"w"} and not parts.personal and not parts.frozen
    model = layout.view("model")
    assert {name: float(x) for name, x in model.read(parts).items()} == {"w": 3, "twice": 6}
    assert model.tracked(parts, {"w": 5.0, "twice": 1.0}) == {"w": 5.0}
    slope = jax.grad(lambda w: sum(jax.tree.leaves(model.read(replace(parts, {"w": w})))))(jnp.float32(3))
    assert float(slope) == 3


@pytest.mark.parametrize("make", [fp.by_role(), fp.by_role(personal="w"), fp.twin(), fp.interpolate(0.5)])
def test_what_a_task_keeps_private_is_never_shared(make):
    task = toys.two_leaves()._replace(private=as_selector("v"))
    with pytest.raises(ValueError, match=r"personal: \['v'\] would be shared, which this task keeps private"):
        make(task)
    assert set(fp.by_role(personal="v")(task).init(task.init(jax.random.key(0))).shared) == {"w"}


def test_names_that_a_layout_does_not_have():
    layout, parts = initial(fp.by_role(), toys.classifier())
    with pytest.raises(ValueError, match=r"view: found 'own'; this layout has \['model'\]"):
        layout.view("own")
    with pytest.raises(ValueError, match=r"role: found 'frozen'; allowed are 'shared', 'personal', 'all'"):
        leaves_of(parts, "frozen")
    with pytest.raises(ValueError, match=r"leaves: \['params/haed'\] are neither shared nor personal"):
        replace(parts, {"params/haed": 0})


@pytest.mark.parametrize("role", ["personal", "frozen"])
def test_a_mask_that_matches_nothing_is_refused(role):
    with pytest.raises(ValueError, match=rf"{role}: norm\(\) selects no leaf of this model.*{role}=nothing"):
        fp.by_role(**{role: fp.norm()})(toys.classifier())
    assert fp.by_role(**{role: fp.nothing})(toys.classifier()).common == "model"
