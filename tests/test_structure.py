"""The shape of the code: imports point down, modules and functions stay small, text is ASCII."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "piper_owner"
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
# These stand side by side at the bottom: the first two see neither each other nor the command.
SIDE_BY_SIDE = ("frontends", "runtime")

_ROW = re.compile(r"^\| `(?P<module>\w+)` \| (?P<what>[^|]+) \|(?P<packages>[^|]*)\|$", re.MULTILINE)


@dataclass(frozen=True)
class Layer:
    """One line of the table."""

    position: int
    packages: frozenset[str]


def read_layers(text: str) -> dict[str, Layer]:
    return {
        row["module"]: Layer(position, frozenset(re.findall(r"[\w.]+", row["packages"])))
        for position, row in enumerate(_ROW.finditer(text))
    }


def modules_of(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def layer_of(file: Path, package: Path) -> str | None:
    """The layer of a module; None for the package's own `__init__` and `__main__`."""
    first = file.relative_to(package).parts[0].removesuffix(".py")
    return None if first in ("__init__", "__main__") else first


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, at any depth; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                dots = "." * level
                yield from ((node.lineno, f"{dots}{module or ''}.{alias.name}") for alias in names)


def wrong_imports(package: Path, layers: dict[str, Layer]) -> list[str]:
    """One line for each import that the table does not allow."""
    wrong = []
    for file in modules_of(package):
        here = layer_of(file, package)
        for line, name in imports_of(ast.parse(file.read_text(encoding="utf-8"))):
            reason = _why_wrong(here, name, layers)
            if reason is not None:
                wrong.append(f"{file.relative_to(package)}:{line} imports {name}: {reason}")
    return wrong


def _why_wrong(here: str | None, name: str, layers: dict[str, Layer]) -> str | None:
    if here is not None and here not in layers:
        return f"{here} is not in the table"
    if name.startswith("."):
        return "imports are absolute"
    top, _, rest = name.partition(".")
    if top != PACKAGE:
        return _why_wrong_package(here, top, layers)
    there = rest.partition(".")[0]
    if there not in layers:
        return "import a name from the module that defines it"
    if here is None or there == here:
        return None
    if here in SIDE_BY_SIDE and there in SIDE_BY_SIDE:
        return f"{here} and {there} do not import each other"
    if layers[there].position > layers[here].position:
        return f"{there} stands below {here}"
    return None


def _why_wrong_package(here: str | None, top: str, layers: dict[str, Layer]) -> str | None:
    if top in sys.stdlib_module_names:
        return None
    allowed = layers[here].packages if here is not None else frozenset()
    return None if top in allowed else f"{here or PACKAGE} does without {top}"


def long_functions(source: str) -> list[tuple[str, int]]:
    """(name, lines) of functions that reach the limit, from `def` or first decorator to the end."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            if lines >= MAX_FUNCTION_LINES:
                found.append((node.name, lines))
    return found


def exported(tree: ast.Module) -> list[str] | None:
    """The names in a module's `__all__`, or None when it has none."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return [str(name) for name in ast.literal_eval(value)]
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return [str(name) for name in ast.literal_eval(value)]
    return None


def defined(tree: ast.Module) -> set[str]:
    """Names that a module's top level binds."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
    return names


LAYERS = read_layers((ROOT / "docs" / "layers.md").read_text(encoding="utf-8"))


def test_table_is_read_whole() -> None:
    assert next(iter(LAYERS)) == "errors"
    assert list(LAYERS)[-3:] == ["frontends", "runtime", "cli"]
    text = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    assert len(LAYERS) == text.count("\n| `")
    assert LAYERS["errors"].packages == frozenset()
    assert LAYERS["data"].packages == {"numpy", "tokenizers"}
    assert [name for name, layer in LAYERS.items() if "ray" in layer.packages] == ["runtime"]
    assert [name for name, layer in LAYERS.items() if "rich" in layer.packages] == ["cli"]
    pure = list(LAYERS)[: list(LAYERS).index("models")]
    assert not any("torch" in LAYERS[name].packages for name in pure)


def test_imports_point_down() -> None:
    assert wrong_imports(ROOT / PACKAGE, LAYERS) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("ownership", "from piper_owner.dag import nodes", "dag stands below ownership"),
        ("ownership", "def f():\n    import piper_owner.executor.config", "executor stands below ownership"),
        ("dag", "import torch", "dag does without torch"),
        ("executor", "import ray.util", "executor does without ray"),
        ("executor", "from rich.table import Table", "executor does without rich"),
        ("frontends", "from piper_owner.runtime import driver", "frontends and runtime do not"),
        ("runtime", "from piper_owner.frontends import piper", "runtime and frontends do not"),
        ("runtime", "from piper_owner.cli import main", "cli stands below runtime"),
        ("errors", "from piper_owner import Tie", "import a name from the module that defines it"),
        ("dag", "from .graph import Graph", "imports are absolute"),
        ("helpers", "import os", "helpers is not in the table"),
        ("__init__", "import torch", "piper_owner does without torch"),
    ],
)
def test_wrong_import_is_found(tmp_path: Path, module: str, source: str, reason: str) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    (found,) = wrong_imports(tmp_path, LAYERS)
    assert reason in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "dag",
            "import enum\nfrom piper_owner.errors import DagError\nfrom piper_owner.dag.nodes import Sync",
        ),
        (
            "cli",
            "from rich import box\nfrom piper_owner.runtime import x\nfrom piper_owner.frontends import y",
        ),
        ("__init__", "from piper_owner.runtime import x"),
    ],
)
def test_right_import_is_let_be(tmp_path: Path, module: str, source: str) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    assert wrong_imports(tmp_path, LAYERS) == []


def test_modules_and_functions_are_small() -> None:
    wrong = []
    for file in modules_of(ROOT / PACKAGE):
        source = file.read_text(encoding="utf-8")
        lines = len(source.splitlines())
        if lines > MAX_MODULE_LINES:
            wrong.append(f"{file.relative_to(ROOT)} has {lines} lines of at most {MAX_MODULE_LINES}")
        wrong += [
            f"{file.relative_to(ROOT)}: {name} has {count} lines of fewer than {MAX_FUNCTION_LINES}"
            for name, count in long_functions(source)
        ]
    assert wrong == []


def test_long_function_is_found() -> None:
    body = "\n".join(["    pass"] * (MAX_FUNCTION_LINES - 1))
    assert long_functions(f"def f():\n{body}") == [("f", MAX_FUNCTION_LINES)]
    assert long_functions(f"class A:\n @b\n async def f():\n{body}") == [("f", MAX_FUNCTION_LINES + 1)]
    assert long_functions("def f():\n    pass") == []


def test_files_are_plain_ascii() -> None:
    folders = (PACKAGE, "tests", "scripts", "docs", ".ci")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*")) if file.is_file()]
    files += [ROOT / name for name in ("README.md", "pyproject.toml", "LICENSE", ".gitignore")]
    text = [file for file in files if "__pycache__" not in file.parts and file.suffix not in (".png", ".svg")]
    assert len(text) > 20
    assert [str(file.relative_to(ROOT)) for file in text if not file.read_bytes().isascii()] == []


def test_every_module_says_what_it_is_and_what_it_gives() -> None:
    wrong = []
    for file in modules_of(ROOT / PACKAGE):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        where = file.relative_to(ROOT)
        if not ast.get_docstring(tree):
            wrong.append(f"{where} has no docstring")
        names = exported(tree)
        # A file that only marks its folder as a package gives nothing and needs no list.
        code = [
            node
            for node in tree.body[1:]
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        ]
        if names is None and code and not file.name.startswith("__main__"):
            wrong.append(f"{where} has no __all__")
        missing = sorted(set(names or ()) - defined(tree))
        if missing:
            wrong.append(f"{where} lists names that it does not have: {missing}")
    assert wrong == []


def test_package_is_marked_as_typed() -> None:
    assert (ROOT / PACKAGE / "py.typed").is_file()
