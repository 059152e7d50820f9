"""Read which module imports which, and judge it by the floors on which packages stand.

A file imports only from floors below its own, or from its own floor. Imports inside functions count as those at the top
do: they are made later, and bind as firmly. Inside one floor no files import each other in a circle; there, what stands
under `if TYPE_CHECKING` does not count, since it never runs. A package whose docstring lists its modules gives their
order: each imports only from those above it, for types too.
"""

from __future__ import annotations

import ast
import re
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
    "aiodist._core": 1,
    "aiodist._version": 1,
    "aiodist._arrays": 2,
    "aiodist._gpu": 3,
    "aiodist._collectives": 4,
    "aiodist._runtime": 5,
    "aiodist._workers": 6,
    "aiodist._data": 7,
    "aiodist._strategy": 8,
    "aiodist._checking": 9,
    "aiodist._torch": 10,
    "aiodist.testing": 10,
    "aiodist._demos": 12,
    "aiodist._tools": 12,
    "aiodist": 12,
    "aiodist.__main__": 13,
}
MAY_IMPORT = {0: {"numpy", "llvmlite", "numba", *sys.stdlib_module_names}, 1: sys.stdlib_module_names}
"""What may be imported from outside of this project, on floors where not all may."""


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
    order: tuple[str, ...] = ()  # of a package's modules, as its docstring lists them

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
    return {name: _read(name, path, files) for name, path in files.items()}


def _read(name: str, path: Path, files: Mapping[str, Path]) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    listed = re.findall(r"^- `(\w+)`", ast.get_docstring(tree) or "", re.MULTILINE)
    return Module(name, path, tuple(_imports(name, path, tree, files)), tuple(listed))


def module_name(path: Path, source: Path) -> str:
    """Name the module that a file is."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations(modules: Mapping[str, Module]) -> list[str]:
    """List, as lines for a person, every import that goes up, and every circle."""
    return [*_strangers(modules), *_upward(modules), *_from_outside(modules), *_circles(modules), *_disorder(modules)]


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


def _from_outside(modules: Mapping[str, Module]) -> Iterator[str]:
    for floor, allowed in MAY_IMPORT.items():
        for module in modules.values():
            for found in module.imports if module.floor == floor else ():
                if found.target.partition(".")[0] not in allowed and floor_of(found.target) is None:
                    yield f"{module.name}:{found.line} (floor {floor}) imports {found.target} from outside"


def _disorder(modules: Mapping[str, Module]) -> Iterator[str]:
    for package in modules.values():
        for name, module in modules.items() if package.order else ():
            own = _inner(name, package)
            if not own:
                continue
            if own not in package.order:
                yield f"{package.name} does not list {own}"
                continue
            for found in module.imports:
                other = _inner(found.target, package)
                if other in package.order[package.order.index(own) + 1 :]:
                    yield f"{name}:{found.line} imports {found.target}, which {package.name} lists below it"


def _inner(name: str, package: Module) -> str:
    """Name the module or package directly in `package` that a module is, or is in; empty if it is in none."""
    return name.removeprefix(f"{package.name}.").partition(".")[0] if name.startswith(f"{package.name}.") else ""


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


def _imports(name: str, path: Path, tree: ast.Module, files: Mapping[str, Path]) -> Iterator[Import]:
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
