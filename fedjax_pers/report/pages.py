"""The documentation pages of methods, written from the registry: one source, and a test that the pages are up to date.

``python -m fedjax_pers.report.pages docs/methods`` writes them.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from fedjax_pers.algorithms import Method, methods


def page(method: Method) -> str:
    """The page of one method in Markdown."""
    factory = inspect.unwrap(method.make)
    settings = "\n".join(f"| `{name}` | `{_shown(default)}` |" for name, default in method.settings.items())
    return f"""# {method.title}

{method.paper}.

| | |
|---|---|
| name | `{method.name}` |
| family | {method.family} |
| stays with the client | {method.personal} |
| reduces to | {method.reduction} |
| secure aggregation | {"possible: the server needs only sums" if method.secure_aggregation else "not possible"} |

{_body(inspect.getdoc(factory) or "")}

## Settings

| setting | default |
|---|---|
{settings}

## Try it

```python
import fedjax_pers as fp

federation = fp.data.load("vowel_speakers")
task = fp.tasks.from_model(federation, "mlp_norm")
algorithm = fp.method("{method.name}").make(task)
print(fp.describe(algorithm.layout))
```

```
fedjax-pers run --data vowel_speakers --model mlp_norm --method {method.name} --rounds 20 --folder results/{method.name}
```

Source: `fedjax_pers/algorithms/{Path(inspect.getfile(factory)).name}`.
"""


def index() -> str:
    """The table of all methods in Markdown."""
    rows = "\n".join(
        f"| [{m.title}]({m.name}.md) | `{m.name}` | {m.family} | {m.personal} | {_yes(m.secure_aggregation)} |"
        for m in methods().values()
    )
    return f"""# Methods

| method | name | family | stays with the client | secure aggregation |
|---|---|---|---|---|
{rows}

*Secure aggregation* says whether the server needs only sums over clients.
"""


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def write(folder: Path) -> None:
    """Writes the index and all pages into a folder, and removes pages of methods that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{name}.md": page(method) for name, method in methods().items()} | {"README.md": index()}
    for stale in {path.name for path in folder.glob("*.md")} - set(pages):
        (folder / stale).unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


def _body(docstring: str) -> str:
    """A docstring in Markdown: its sections as headings and lists."""
    lines = docstring.splitlines()
    text, section = [], ""
    for line in lines:
        if line.strip() in ("Args:", "Example:", "Returns:", "Raises:"):
            section = line.strip()
            if section == "Args:":
                text += ["## Arguments", ""]
            continue
        if section == "Args:" and line.startswith("  "):
            entry = line.strip()
            name, separator, meaning = entry.partition(": ")
            starts = line.startswith("  ") and not line.startswith("    ") and separator
            text.append(f"- `{name}`: {meaning}" if starts else f"  {entry}")
            continue
        if line and not line.startswith(" "):
            section = ""
        text.append(line.replace("Differences from the paper:", "**Differences from the paper:**"))
    return "\n".join(text).replace("``", "`")


def _shown(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return getattr(default, "__name__", str(default))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
