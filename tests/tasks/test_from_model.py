"""The package's models as tasks, by name."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from fedjax_pers import models
from fedjax_pers.tasks import from_model, linen

EXAMPLE = (("x", (10,), "float32"), ("y", (), "int32"))
FEDERATION = SimpleNamespace(example=EXAMPLE, num_classes=11)


def test_a_federation_says_what_examples_and_classes_there_are():
    task = from_model(FEDERATION, "mlp", hidden=(8,))
    assert task is linen(models.build("mlp", EXAMPLE, 11, hidden=(8,)), EXAMPLE, num_classes=11)
    shapes = jax.eval_shape(task.init, jax.random.key(0))["params"]
    assert shapes["hidden1"]["kernel"].shape == (10, 8) and shapes["head"]["kernel"].shape == (8, 11)


def test_an_example_needs_the_number_of_classes_beside_it():
    assert from_model(EXAMPLE, "linear", num_classes=11) is from_model(FEDERATION, "linear")
    with pytest.raises(ValueError, match="num_classes: found None"):
        from_model(EXAMPLE, "linear")


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="num_classes: found 10, but the federation has 11"):
        from_model(FEDERATION, "mlp", num_classes=10)
    with pytest.raises(ValueError, match="model: found 'mpl'.*Did you mean 'mlp'"):
        from_model(FEDERATION, "mpl")
    with pytest.raises(ValueError, match="setting of mlp: found 'hiden'.*Did you mean 'hidden'"):
        from_model(FEDERATION, "mlp", hiden=(8,))
    with pytest.raises(ValueError, match=r"cnn: found x of shape \(10,\)"):
        from_model(FEDERATION, "cnn")
