"""Read which module imports which, and judge it by the floors on which packages stand.

A file imports only from floors below its own, or from its own floor. Imports inside functions count as those at the top
do: they are made later, and bind as firmly. Inside one floor no files import each other in a circle; there, what stands
under `if TYPE_CHECKING` does not count, since it never runs.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# The longest prefix of a module's name decides. `aiodist.testing*` may be a module, a package, or several modules.
# `aiodist` itself, the list of public names, stands beside the tools: they use it as any program does.
FLOORS: Mapping[str, int] = {
    "aiodist_kernels": 0,
    "aiodist.vocabulary": 1,
    "aiodist.gpu": 2,
    "aiodist.collective": 2,
    "aiodist.workers": 2,
    "aiodist.replica": 3,
    "aiodist.strategy": 4,
    "aiodist.data": 4,
    "aiodist.tools": 5,
    "aiodist._demos": 5,
    "aiodist.checking": 5,
    "aiodist.testing": 5,
    "aiodist": 5,
    "aiodist.__main__": 6,
}
OUTSIDE_OF_KERNELS = frozenset({"numpy", "numba", *sys.stdlib_module_names})


@dataclass(frozen=True, slots=True)
class Import:
    """One module that a file imports."""

    target: str
    line: int
    for_types_only: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One file, and what it imports."""

    name: str
    path: Path
    imports: tuple[Import, ...]

    @property
    def floor(self) -> int | None:
        """The floor on which it stands."""
        return floor_of(self.name)


def floor_of(name: str) -> int | None:
    """Find the floor of a module; None if it stands on none of ours."""
    if name in FLOORS:
        return FLOORS[name]
    if name.startswith("aiodist.testing"):
        return FLOORS["aiodist.testing"]
    package, _, rest = name.rpartition(".")
    return floor_of(package) if rest and package != "aiodist" else None


def read_tree(root: Path) -> dict[str, Module]:
    """Read every module under `root`, a checkout."""
    files = {
        module_name(path, source): path
        for source in (root, root / "kernels")
        for package in ("aiodist", "aiodist_kernels")
        for path in sorted((source / package).rglob("*.py"))
    }
    return {name: Module(name, path, tuple(_imports(name, path, files))) for name, path in files.items()}


def module_name(path: Path, source: Path) -> str:
    """Name the module that a file is."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations(modules: Mapping[str, Module]) -> list[str]:
    """List, as lines for a person, every import that goes up, and every circle."""
    return [*_strangers(modules), *_upward(modules), *_foreign_to_kernels(modules), *_circles(modules)]


def _strangers(modules: Mapping[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if module.floor is None:
            yield f"{module.name} stands on no floor"


def _upward(modules: Mapping[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for found in module.imports:
            own, other = module.floor, floor_of(found.target)
            if own is not None and other is not None and other > own:
                yield f"{module.name}:{found.line} (floor {own}) imports {found.target} (floor {other})"


def _foreign_to_kernels(modules: Mapping[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for found in module.imports if module.floor == 0 else ():
            top = found.target.partition(".")[0]
            if top not in OUTSIDE_OF_KERNELS and floor_of(found.target) is None:
                yield f"{module.name}:{found.line} (floor 0) imports {found.target}, neither numpy nor numba"


def _circles(modules: Mapping[str, Module]) -> Iterator[str]:
    for floor in sorted(set(FLOORS.values())):
        graph = {
            module.name: {found.target for found in module.imports if not found.for_types_only} - {module.name}
            for module in modules.values()
            if module.floor == floor
        }
        try:
            TopologicalSorter({name: targets & graph.keys() for name, targets in graph.items()}).prepare()
        except CycleError as error:
            yield f"floor {floor}: import circle {' -> '.join(reversed(error.args[1]))}"


def _imports(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    typing_only = {id(node) for block in ast.walk(tree) if _is_type_checking(block) for node in _inside(block)}
    for node in ast.walk(tree):
        for target in _targets(node, package, files):
            yield Import(target, node.lineno, id(node) in typing_only)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def _targets(node: ast.AST, package: str, files: Mapping[str, Path]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = _absolute(module or "", package, level)
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            yield module


def _absolute(module: str, package: str, level: int) -> str:
    if level == 0:
        return module
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, *filter(None, [module])])


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _inside(block: ast.AST) -> Iterator[ast.AST]:
    assert isinstance(block, ast.If)
    for statement in block.body:
        yield from ast.walk(statement)
