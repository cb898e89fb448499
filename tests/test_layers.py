"""Arrows point down: what the engine is made of imports nothing that measures, audits or commands it."""

from __future__ import annotations

import ast
from pathlib import Path

import foretoken

ROOT = Path(foretoken.__file__).parent
ABOVE = {"audit", "bench", "cli", "pages", "peers", "tune", "workloads"}
"""Packages that may be imported by one another only, and by the program's entry."""

ORDER = ("workloads", "peers", "bench", "tune", "cli")
"""Each may import those before it."""


def imported(file: Path) -> set[str]:
    """Packages of Foretoken that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "foretoken":
            names = [node.module] if "." in node.module else [f"foretoken.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("foretoken.")}
    return found


def files() -> list[tuple[str, Path]]:
    """Every module, with the package that it is in."""
    found = [(file.relative_to(ROOT).parts[0], file) for file in sorted(ROOT.rglob("*.py"))]
    return [(package, file) for package, file in found if file.name != "__main__.py"]


def test_nothing_below_imports_what_is_above() -> None:
    wrong = {
        str(file.relative_to(ROOT)): sorted(imported(file) & ABOVE)
        for package, file in files()
        if package not in ABOVE and imported(file) & ABOVE
    }
    assert wrong == {}


def test_packages_above_have_an_order() -> None:
    for package, file in files():
        allowed = set(ORDER[: ORDER.index(package) + 1]) if package in ORDER else ABOVE - {"bench", "tune", "cli"}
        if package in ABOVE and package != "cli":
            assert imported(file) & ABOVE <= {*allowed, "pages", package}, file
