"""The folders' order, and what the driver may not import, read from the sources."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["configs", "layers", "workers", "serve"]  # each may import itself and those before it
SOURCES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST, package: str) -> Iterator[str]:
    """Absolute names imported anywhere in a tree, but for those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in child.names)
        elif not is_type_checking(child):
            yield from imports(child, package)


def imports_of(path: Path) -> set[str]:
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), package))


MODULES = {module_name(path): path for path in SOURCES}


def reachable(module: str) -> set[str]:
    """Everything a module imports, directly or through modules and packages of ours."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        parents = [name.rsplit(".", up)[0] for up in range(1, name.count(".") + 1)]
        for found in [name, *parents]:
            if found not in seen:
                seen.add(found)
                if found in MODULES:
                    todo += imports_of(MODULES[found])
    return seen


def test_there_is_something_to_check() -> None:
    assert {"configs.engine", "workers.step", "serve.driver.scheduler"} <= MODULES.keys()
    assert {"configs", "workers.step", "msgspec"} <= reachable("serve.driver.scheduler")


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_packages_import_downwards_only(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    above = ORDER[ORDER.index(package) + 1 :]
    assert [name for name in sorted(imports_of(path)) if name.split(".")[0] in above] == []


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("serve.driver")])
def test_the_driver_imports_no_torch(module: str) -> None:
    tops = {name.split(".")[0] for name in reachable(module)}
    assert tops & {"torch", "ray", "numpy", "transformers", "layers"} == set()


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_module_bears_a_standard_library_name(path: Path) -> None:
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    assert stem not in sys.stdlib_module_names
