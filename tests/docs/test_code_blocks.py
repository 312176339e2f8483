"""Every Python block of the front page and of the documentation runs, in order, and links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    from fedjax_pers.algorithms import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))  # a page may register a method of its own
    namespace = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{name(page)}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def commands() -> list[tuple[str, str]]:
    """Every ``fedjax-pers`` command of the pages."""
    return [
        (name(page), line)
        for page in PAGES
        for _, code in FENCE.findall(page.read_text(encoding="utf-8"))
        for line in code.replace("\\\n", " ").splitlines()
        if line.startswith("fedjax-pers ")
    ]


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_understood(page, line):
    """Parsed as the shell would give them, and all that can fail is built; the runs themselves are tested elsewhere."""
    from fedjax_pers import cli
    from fedjax_pers.simulate.study import validate

    command = cli.parse(shlex.split(line, comments=True)[1:])
    methods = getattr(command, "methods", None) or [getattr(command, "method", None)]
    if hasattr(command, "chosen"):
        for method in methods:
            validate(dataclasses.replace(command.chosen(command.config), method=method))


def test_method_pages_are_up_to_date():
    from fedjax_pers.algorithms import methods
    from fedjax_pers.report.pages import index, page

    folder = ROOT / "docs" / "methods"
    expected = {f"{name}.md": page(method) for name, method in methods().items()} | {"README.md": index()}
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    stale = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
    assert not stale, f"run: python -m fedjax_pers.report.pages docs/methods; stale are {stale}"


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.py")), ids=name)
def test_notebooks_run(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(notebook.read_text(encoding="utf-8"), name(notebook), "exec"), {"__name__": "__main__"})
