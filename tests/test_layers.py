"""Imports point one way, between the packages and inside each; docs/architecture.md draws the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each part may import of its own package, besides itself.
MAY_IMPORT: dict[str, dict[str, set[str]]] = {
    "tuner": {
        "plain": set(),
        "records": {"plain", "secrets"},
        "errors": {"records"},
        "files": set(),
        "secrets": set(),
        "foreign": set(),
        "ask": {"foreign"},
        "space": {"records", "errors", "engines"},
        "engines": {"records", "errors", "secrets"},
        "launch": {"plain", "records", "errors", "foreign", "ask"},
        "bench": {"records", "errors", "foreign", "ask"},
        "judge": {"records", "errors"},
        "search": {"records", "errors", "engines"},
        "study": {
            "plain",
            "records",
            "errors",
            "files",
            "secrets",
            "foreign",
            "ask",
            "space",
            "engines",
            "launch",
            "bench",
            "judge",
            "search",
        },
        "export": {"records", "errors", "files", "secrets", "ask", "space", "engines", "launch", "judge", "study"},
        "report": {"records", "errors", "judge", "search", "study"},
        "workers": {"errors", "space"},
        "cli": {
            "records",
            "errors",
            "files",
            "ask",
            "space",
            "engines",
            "launch",
            "bench",
            "judge",
            "study",
            "export",
            "report",
            "workers",
        },
    },
    "engine": {
        "errors": set(),
        "cache": set(),
        "config": set(),
        "ipc": set(),
        "request": {"ipc"},
        "ops": {"cache", "errors"},
        "collectives": {"config", "errors", "ops"},
        "graphs": {"errors"},
        "device": {"graphs", "ops"},
        "cuda": {"device", "errors", "graphs", "ops"},
        "ranks": {"collectives", "config", "errors", "ipc", "logs"},
        "memory": {"errors"},
        "text": {"cache", "errors", "model"},
        "model": {"cache", "collectives", "errors", "memory", "ops"},
        "spec": {"config", "device", "errors", "graphs", "heads", "ipc", "request", "memory", "model", "ops"},
        "heads": set(),
        "scheduler": {"config", "ipc", "request", "memory", "spec"},
        "build": {
            *("config", "cuda", "device", "errors", "graphs", "ipc"),
            *("memory", "model", "ops", "ranks", "scheduler", "spec"),
        },
        "reconfigure": {"build", "config", "errors", "ipc", "scheduler", "spec"},
        "worker": {"build", "config", "errors", "ipc", "ranks", "reconfigure"},
        "server": {"config", "errors", "ipc", "logs", "model", "text", "worker"},
        "train": {"build", "cache", "config", "errors", "ipc", "memory", "model", "ops", "text"},
        "logs": set(),
        "bench": {"build", "config", "errors", "ipc", "ranks", "text", "worker"},
        "export": {"errors", "model", "text"},
        "export_head": {"errors", "model"},
        "cli": {
            "bench",
            "build",
            "cache",
            "config",
            "errors",
            "export",
            "export_head",
            "logs",
            "model",
            "server",
            "spec",
            "train",
        },
    },
}


def imports(file: Path) -> Iterator[str]:
    """Absolute module names that a file imports, also inside functions, but not for type checking alone."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    other = ({"tuner", "engine"} - {package}).pop()
    allowed = MAY_IMPORT[package]
    wrong = []
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT / package).with_suffix("").parts
        own = parts[0]
        if own in ("__init__", "__main__"):
            continue
        assert own in allowed, f"{file.relative_to(ROOT)}: '{own}' has no place in the layers; give it one here"
        for module in imports(file):
            names = module.split(".")
            if names[0] == other:
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
            below = names[1] if names[0] == package and len(names) > 1 else own
            if below in allowed and below != own and below not in allowed[own]:
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_the_layers_have_no_cycle(package: str) -> None:
    left = {name: set(below) for name, below in MAY_IMPORT[package].items()}
    while left:
        free = [name for name, below in left.items() if not below & left.keys()]
        assert free, f"cycle among {sorted(left)}"
        for name in free:
            del left[name]
