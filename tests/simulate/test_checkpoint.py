"""Saving and restoring trees: everything that must be refused, and what a kill leaves behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.simulate.checkpoint import KEPT, latest, restore, save

TREE = {"w": jnp.arange(6.0).reshape(2, 3), "step": jnp.int32(4), "nothing": None, "key": jax.random.key(5)}


def test_a_numpy_template_gives_numpy_back_and_shapes_do_as_a_template(tmp_path):
    save(tmp_path, 0, {"a": np.float64(0.1), "b": np.arange(3), "c": jnp.ones(2)})
    found = restore(tmp_path, {"a": np.float64(0), "b": np.zeros(3, int), "c": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert type(found["a"]) is np.float64 and found["a"] == 0.1
    assert type(found["b"]) is np.ndarray and found["b"].tolist() == [0, 1, 2]
    assert isinstance(found["c"], jax.Array)


def test_a_dtype_that_jax_would_cast_is_refused(tmp_path):
    save(tmp_path, 0, {"a": np.float64(0.1)})
    with pytest.raises(ValueError, match=r"\['a'\].*float64.*float32"):
        restore(tmp_path, {"a": jax.ShapeDtypeStruct((), np.float64)})


def test_arrays_without_elements_and_trees_without_arrays(tmp_path):
    save(tmp_path, 0, {"empty": jnp.zeros((0, 3), jnp.bfloat16), "keys": jax.random.split(jax.random.key(0), 0)})
    found = restore(tmp_path, {"empty": jnp.ones((0, 3), jnp.bfloat16), "keys": jax.random.split(jax.random.key(1), 0)})
    assert found["empty"].shape == (0, 3) and found["empty"].dtype == jnp.bfloat16
    assert found["keys"].shape == (0,) and jnp.issubdtype(found["keys"].dtype, jax.dtypes.prng_key)
    save(tmp_path, 1, {"nothing": None})
    assert restore(tmp_path, {"nothing": None}) == {"nothing": None}
    save(tmp_path, 2, jnp.float32(3))
    assert restore(tmp_path, jnp.float32(0)) == 3


def test_text_and_whole_numbers_are_different_keys_of_a_dict(tmp_path):
    save(tmp_path, 0, {10: jnp.ones(1)})
    with pytest.raises(ValueError, match=r"\[10\]: .*no such leaf"):
        restore(tmp_path, {"10": jnp.ones(1)})


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [(3, "3 of type int"), ("text", "'text' of type str"), (np.array(["a"], object), "of type ndarray")],
)
def test_leaves_that_would_come_back_as_something_else_are_refused(tmp_path, leaf, expected):
    with pytest.raises(ValueError, match=rf"\['bad'\]: .*{expected}.*allowed"):
        save(tmp_path, 0, {"bad": leaf})
    assert latest(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"w": jnp.zeros((3, 2))}, r"\['w'\]: .*float32\[2, 3\].*float32\[3, 2\]"),
        ({"w": jnp.zeros((2, 3), jnp.bfloat16)}, r"\['w'\]: .*float32\[2, 3\].*bfloat16\[2, 3\]"),
        ({"nothing": jnp.zeros(())}, r"\['nothing'\]: .*None.*float32\[\]"),
        ({"step": None}, r"\['step'\]: .*int32\[\].*None"),
        ({"key": jax.random.key(5, impl="rbg")}, r"\['key'\]: .*threefry2x32.*rbg"),
        ({"key": jax.random.key_data(jax.random.key(5))}, r"\['key'\]: .*key threefry2x32.*array uint32\[2\]"),
        ({"more": jnp.zeros(())}, r"\['more'\]: .*has no such leaf, the template array float32"),
    ],
)
def test_another_template_is_refused_and_both_sides_are_named(tmp_path, change, expected):
    save(tmp_path, 0, TREE)
    with pytest.raises(ValueError, match=expected):
        restore(tmp_path, TREE | change)


def test_a_template_with_a_leaf_less_is_refused(tmp_path):
    save(tmp_path, 0, TREE)
    with pytest.raises(ValueError, match=r"\['step'\]: .*array int32\[\], the template no such leaf"):
        restore(tmp_path, {name: leaf for name, leaf in TREE.items() if name != "step"})


def test_a_saved_step_is_never_replaced(tmp_path):
    save(tmp_path, 3, {"w": jnp.ones(2)})
    with pytest.raises(FileExistsError, match="already saved"):
        save(tmp_path, 3, {"w": jnp.zeros(2)})
    assert restore(tmp_path, {"w": jnp.zeros(2)})["w"].tolist() == [1, 1]


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None])
def test_steps_are_whole_numbers(tmp_path, step):
    with pytest.raises(ValueError, match="step: found"):
        save(tmp_path, step, {"w": jnp.ones(2)})


def test_the_last_ones_stay_and_any_of_them_can_be_restored(tmp_path):
    for step in (1, 2, 9, 10):
        save(tmp_path, step, {"w": jnp.float32(step)})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["10", "9"] and KEPT == 2
    assert latest(tmp_path) == 10
    assert restore(tmp_path, {"w": jnp.float32(0)})["w"] == 10
    assert restore(tmp_path, {"w": jnp.float32(0)}, 9)["w"] == 9


def test_what_is_not_there_is_said(tmp_path):
    assert latest(tmp_path / "absent") is None
    with pytest.raises(FileNotFoundError, match="expected any"):
        restore(tmp_path / "absent", {})
    save(tmp_path, 1, TREE)
    with pytest.raises(FileNotFoundError, match=r"steps \[1\], expected 2"):
        restore(tmp_path, TREE, 2)


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = save(tmp_path, 1, TREE)
    for content in (path / "leaves").rglob("*"):
        if content.is_file():
            content.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{path}: cannot be read; remove it"):
        restore(tmp_path, TREE)


def test_a_full_disk_leaves_the_checkpoints_before_it(tmp_path, capfd):
    save(tmp_path, 1, TREE)
    large = {"noise": np.random.default_rng(0).normal(size=200_000)}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the size at which writing fails
    try:
        with pytest.raises(OSError, match="could not be written: no space left on its disk.*2"):
            save(tmp_path, 2, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "Traceback" not in capfd.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
    save(tmp_path, 2, large)
    assert latest(tmp_path) == 2


def test_the_original_is_neither_needed_nor_changed_afterwards(tmp_path):
    original = {"w": np.ones(3)}
    save(tmp_path, 0, original)
    original["w"][:] = 7
    assert restore(tmp_path, original)["w"].tolist() == [1, 1, 1]


SAVER = """
import os, signal, sys
import jax.numpy as jnp
from fedjax_pers.simulate.checkpoint import save

folder, moment = sys.argv[1:]
for step in (1, 2):
    save(folder, step, {"w": jnp.full(1000, float(step))})

def kill(event, args):
    paths = [str(arg) for arg in args if isinstance(arg, (str, os.PathLike))]
    if event == moment.split(":")[0] and paths and paths[-1].endswith(moment.split(":")[1]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
save(folder, 3, {"w": jnp.full(1000, 3.0)})
"""


@pytest.mark.parametrize(
    ("moment", "last"),
    [
        ("os.mkdir:tmp", 2),  # its folder is about to be made
        ("os.rename:/3", 2),  # all is written, and it is about to get its name
        ("os.rename:/1.removed", 3),  # the oldest is about to be taken away
        ("shutil.rmtree:/1.removed", 3),
    ],
)
def test_a_kill_while_saving_leaves_the_checkpoint_before_or_the_new_one(tmp_path, moment, last):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SAVER, str(tmp_path), moment]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    template = {"w": jnp.zeros(1000)}
    assert latest(tmp_path) == last
    assert restore(tmp_path, template)["w"].tolist() == [last] * 1000
    save(tmp_path, 4, template)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [str(last), "4"]
