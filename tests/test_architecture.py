"""The shape of the package: layers import only lower ones, methods do not know each other, files stay readable."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedjax_pers"
LONGEST_FILE = 420

# A room is a file or a folder directly in the package. Each layer may import its own rooms and those of lower layers.
LAYERS = {
    0: {
        "typing",
        "base",
        "paths",
        "parsing",
        "presets",
        "tracing",
        "once",
        "example_axis",
        "per_example",
        "trees",
        "keys",
        "checks",
        "batches",
        "config",
        "judging",
        "head_inputs",
    },
    1: {
        "adapters",
        "layouts",
        "objectives",
        "features",
        "generators",
        "mixtures",
        "local",
        "fisher",
        "tuning",
        "masks",
        "aggregators",
        "executors",
        "stores",
        "tasks",
        "models",
        "data",
    },
    2: {"compose", "surveys", "adaptation", "wrappers", "evaluation", "privacy", "traffic"},
    3: {"algorithms"},
    4: {"simulate", "report", "cli", "testing", "__main__"},
}
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}

# What a user brings (a model, its task, the data) builds on layer 0 alone, and no method depends on it.
ADAPTERS = {"tasks", "models", "data"}


def modules(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """``fedjax_pers.report.tables`` lies in ``report``; ``fedjax_pers`` itself has no room."""
    return module.split(".")[1] if module.count(".") else ""


NAMES = {name_of(path) for path in modules()}


def imports_of(source: str, module: str, is_package: bool = False) -> set[str]:
    """Modules of the package that a source text imports, wherever in the text, relative imports resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: None if is_package else -1]
            above = parts[: len(parts) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & NAMES) | ({base} if inner - NAMES else set())
    return {name for name in found if name == "fedjax_pers" or name.startswith("fedjax_pers.")}


def imports_in(path: Path) -> set[str]:
    return imports_of(path.read_text(), name_of(path), path.name == "__init__.py")


def test_imports_are_read_in_all_their_forms():
    source = """
import numpy
import fedjax_pers.paths
from fedjax_pers import trees
from fedjax_pers.data import bundle_of, partitioners
from fedjax_pers.base import Task
from . import files
from ..evaluation.statistics import summarize
def later():
    from fedjax_pers import cohort_of
"""
    assert imports_of(source, "fedjax_pers.report.tables") == {
        "fedjax_pers.paths",
        "fedjax_pers.trees",
        "fedjax_pers.base",
        "fedjax_pers.data",
        "fedjax_pers.data.partitioners",
        "fedjax_pers.report.files",
        "fedjax_pers.evaluation.statistics",
        "fedjax_pers",
    }


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_layer_imports_only_lower_ones(path):
    room = room_of(name_of(path))
    assert room in LAYER_OF, f"{room}: a new room; give it a layer in this test and in the design page"
    for imported in sorted(imports_in(path)):
        other = room_of(imported)
        assert other, f"{name_of(path)} imports the package itself, which imports every room; name the room"
        assert other in LAYER_OF, f"{name_of(path)} imports {imported}, a room without a layer"
        assert LAYER_OF[other] <= LAYER_OF[room], f"{name_of(path)} (layer {LAYER_OF[room]}) imports {imported}"
        if room in ADAPTERS:
            allowed = ADAPTERS | LAYERS[0]
            assert other in allowed, f"{name_of(path)} imports {imported}; adapters build on layer 0 alone"


def test_rooms_do_not_import_each_other_in_circles():
    graph: dict[str, set[str]] = {}
    for path in modules():
        room = room_of(name_of(path))
        graph.setdefault(room, set()).update(room_of(imported) for imported in imports_in(path))
        graph[room] -= {room, ""}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"rooms in a circle: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("path", modules(PACKAGE / "algorithms"), ids=name_of)
def test_methods_do_not_import_each_other(path):
    if path.name == "__init__.py":
        return
    others = {name for name in imports_in(path) if room_of(name) == "algorithms"}
    assert others <= {"fedjax_pers.algorithms.registry"}


@pytest.mark.parametrize("folder", ["fedjax_pers", "tests", "experiments", "benchmarks"])
def test_files_stay_readable(folder):
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")
    }
    assert not {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE}


def test_every_room_is_named_for_what_is_in_it():
    vague = {"utils", "util", "helpers", "helper", "misc", "common", "core", "_src"}
    assert not [name for name in NAMES if vague & set(name.split("."))]


def test_importing_the_package_brings_neither_plots_nor_checkpoints_nor_the_command_line():
    """They take half a second and 60 MB, which a script that only runs rounds does not need."""
    heavy = ("matplotlib", "orbax", "tyro", "fedjax_pers.report.plots", "fedjax_pers.simulate.study")
    program = f"import sys, fedjax_pers; print(*sorted(set(sys.modules) & set({heavy})))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []
