"""Checkpoints that give back what was put in: the same tree, the same types, the same bits.

A checkpoint is a folder named by its step. It appears as a whole or not at all, so a kill at any moment leaves the ones
before it. Inside, orbax keeps the arrays, and a manifest says what each leaf of the tree was: its path (in which the
keys ``10`` and ``"10"`` differ), its kind, dtype and shape. Nothing is ever cast, cut or filled in.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.checks import require
from fedjax_pers.report import files

KEPT = 2
"""Checkpoints that stay; older ones are removed once a new one is complete."""

_LEAVES, _MANIFEST = "leaves", "manifest"


class Leaf(NamedTuple):
    """What a leaf is.

    Attributes:
      kind: ``"array"``, ``"key"`` (a typed random key) or ``"none"``.
      type: dtype of an array, implementation of a key.
      shape: of the array, or of the array of keys.
    """

    kind: str
    type: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "None" if self.kind == "none" else f"{self.kind} {self.type}{list(self.shape)}"


def save(folder: str | os.PathLike[str], step: int, tree: Any) -> Path:
    """Writes ``folder/step``; remains of killed saves and all but the last checkpoints are removed.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = save(folder, 3, {"key": jax.random.key(0), "none": None, "rows": {10: jnp.ones(2)}})
      >>> latest(folder)
      3

    Args:
      folder: holds the checkpoints of one run, and nothing else; made where it does not exist.
      step: a whole number from 0.
      tree: a pytree of arrays (JAX's or numpy's), typed random keys and ``None``.

    Returns:
      The new checkpoint's folder.

    Raises:
      FileExistsError: the step is already there.
      ValueError: the step is not a whole number from 0, or a leaf is something else.
      OSError: it cannot be written; the checkpoints before it are still there.
    """
    whole = isinstance(step, int | np.integer) and not isinstance(step, bool)
    require(whole and step >= 0, f"step: found {step!r}; allowed are whole numbers from 0")
    path = Path(folder).absolute() / str(step)
    if path.exists():
        raise FileExistsError(f"{path}: this step is already saved; a checkpoint is never replaced")
    named = _flatten(tree)
    leaves = {name: _described(name, value) for name, value in named.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_remains(path.parent)
    arrays = {_place(index): _stored(named[name]) for index, name in _filled(leaves)}
    manifest = [{"path": name, **leaf._asdict()} for name, leaf in leaves.items()]
    ocp = _orbax()
    items = {_MANIFEST: ocp.args.JsonSave({"leaves": manifest})}
    if arrays:  # orbax has no form for a tree without leaves
        items[_LEAVES] = ocp.args.PyTreeSave(arrays)
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, ocp.args.Composite(**items))
    except Exception as error:  # orbax and tensorstore raise many types for the same thing
        _remove_remains(path.parent)
        full = any(f"os_error_code='{code}'" in str(error) for code in files.FULL)
        reason = "no space left on its disk" if full else str(error)
        raise OSError(errno.EIO, f"the checkpoint could not be written: {reason}", str(path)) from error
    for old in _steps(path.parent)[:-KEPT]:
        _remove(path.parent / str(old))
    return path


def latest(folder: str | os.PathLike[str]) -> int | None:
    """The last complete step, or ``None``. What a kill has left half-written does not count."""
    return max(_steps(Path(folder)), default=None)


def restore(folder: str | os.PathLike[str], template: Any, step: int | None = None) -> Any:
    """The tree of a step, in the structure of ``template``.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = save(folder, 0, {"w": jnp.ones(2, jnp.bfloat16)})
      >>> restore(folder, {"w": jnp.zeros(2, jnp.float32)})
      Traceback (most recent call last):
      ValueError: ['w']: the checkpoint has array bfloat16[2], the template array float32[2]...

    Args:
      folder: as for :func:`save`.
      template: a tree of the same structure. Its values are not used; shapes (``jax.eval_shape``) do as well. Where it
        has numpy arrays, numpy arrays come back.
      step: by default the last.

    Raises:
      FileNotFoundError: no such step, or none at all.
      ValueError: the template has a leaf more, a leaf less, or one of another kind, dtype or shape (the message names
        the leaf and both sides); or the checkpoint is damaged.
    """
    folder = Path(folder).absolute()
    steps = _steps(folder)
    chosen = max(steps, default=None) if step is None else step
    if chosen not in steps:
        raise FileNotFoundError(
            f"{folder}: found checkpoints of the steps {steps}, expected {'any' if step is None else step}"
        )
    path = folder / str(chosen)
    leaves = _read_manifest(path)
    wanted = _flatten(template)
    _compare(path, leaves, {name: _described(name, value) for name, value in wanted.items()})
    arrays = _read_arrays(path, leaves)
    treedef = jax.tree.structure(template, is_leaf=_is_none)
    restored = [_restored(name, leaves[name], arrays.get(name), like) for name, like in wanted.items()]
    return jax.tree.unflatten(treedef, restored)


def _flatten(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(keys) or "(the tree)": value for keys, value in _with_path(tree)}


def _with_path(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)[0]


def _is_none(value: Any) -> bool:
    return value is None


def _described(name: str, value: Any) -> Leaf:
    if value is None:
        return Leaf("none")
    dtype = getattr(value, "dtype", None)
    require(
        dtype is not None and hasattr(value, "shape") and not jnp.issubdtype(dtype, np.object_),
        f"{name}: found {value!r} of type {type(value).__name__}; allowed are arrays, typed random keys and None",
    )
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return Leaf("key", str(jax.random.key_impl(jnp.empty((), dtype))), tuple(value.shape))
    return Leaf("array", np.dtype(dtype).name, tuple(value.shape))


def _filled(leaves: dict[str, Leaf]) -> Iterator[tuple[int, str]]:
    """Leaves with content: orbax refuses arrays without elements, and the manifest says all there is to say of them."""
    for index, (name, leaf) in enumerate(leaves.items()):
        if leaf.kind != "none" and 0 not in leaf.shape:
            yield index, name


def _place(index: int) -> str:
    return f"{index:06d}"


def _stored(value: Any) -> np.ndarray:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def _restored(name: str, leaf: Leaf, stored: np.ndarray | None, wanted: Any) -> Any:
    if leaf.kind == "none":
        return None
    if leaf.kind == "key":
        blank = jnp.empty(leaf.shape, wanted.dtype)
        return blank if stored is None else jax.random.wrap_key_data(stored, impl=jax.random.key_impl(blank))
    array = np.zeros(leaf.shape, leaf.type) if stored is None else stored
    if isinstance(wanted, np.ndarray):
        return array
    if isinstance(wanted, np.generic):
        return array[()]
    value = jnp.asarray(array)
    require(value.dtype == array.dtype, f"{name}: the checkpoint has {leaf}, which JAX would hold as {value.dtype} now")
    return value


def _compare(path: Path, found: dict[str, Leaf], wanted: dict[str, Leaf]) -> None:
    for name in [*found, *wanted]:
        here, there = found.get(name), wanted.get(name)
        require(
            here == there,
            f"{name}: the checkpoint has {here or 'no such leaf'}, the template {there or 'no such leaf'} ({path})",
        )


def _read_manifest(path: Path) -> dict[str, Leaf]:
    found = _read(path, _MANIFEST, _orbax().args.JsonRestore())
    return {one["path"]: Leaf(one["kind"], one["type"], tuple(one["shape"])) for one in found["leaves"]}


def _read_arrays(path: Path, leaves: dict[str, Leaf]) -> dict[str, np.ndarray]:
    places = {name: _place(index) for index, name in _filled(leaves)}
    found = _read(path, _LEAVES, _orbax().args.PyTreeRestore()) if places else {}
    return {name: np.asarray(found[place]) for name, place in places.items()}


def _read(path: Path, item: str, how: Any) -> Any:
    try:
        with _checkpointer() as checkpointer:
            return checkpointer.restore(path, _orbax().args.Composite(**{item: how}))[item]
    except Exception as error:
        raise ValueError(f"{path}: cannot be read; remove it to go on from the one before it ({error})") from error


def _steps(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()) if folder.is_dir() else []


def _remove_remains(folder: Path) -> None:
    """Removes what killed saves have left: everything that is not a complete checkpoint."""
    for entry in folder.iterdir():
        if not entry.name.isdecimal():
            shutil.rmtree(entry, ignore_errors=True)


def _remove(path: Path) -> None:
    # Renamed first: a checkpoint of which a kill has left a part must not be taken for a whole one.
    doomed = path.with_name(f"{path.name}.removed")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _orbax() -> Any:
    import orbax.checkpoint as ocp  # as long to import as JAX itself, so only where it is used

    return ocp


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """A checkpointer of orbax, whose errors are raised and not logged with a traceback besides."""
    ocp, logger = _orbax(), logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            yield checkpointer
    finally:
        logger.disabled = before
