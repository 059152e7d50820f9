"""Calls as they travel: signatures and call sites without what belongs to one process, and back.

A call site is kept as a code object and an offset, which mean nothing elsewhere; it travels as file, line, column and
function, and becomes a code object again that stands at that place. So everything that compares calls and writes
reports for one process does so for many.

Files are named from the entry of ``sys.path`` that they lie under: checkouts may lie in different places on different
machines.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from types import CodeType, ModuleType
from typing import Any, NamedTuple, TypeAlias

from aiodist._arrays import frameworks
from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._core.call import OrderCheck
from aiodist._core.report import Reason
from aiodist.collective import kinds, sameness
from aiodist.collective.callsite import Place, location, place
from aiodist.collective.describe import FunctionKey
from aiodist.collective.kinds import Kind
from aiodist.collective.signature import DETAIL, KIND, PATH, TYPES, Signature

Call: TypeAlias = tuple[Signature, CodeType, int]


class Site(NamedTuple):
    """A place in a program, as it travels."""

    file: str
    line: int
    column: int | None
    function: str


class WireKind(NamedTuple):
    """A kind of collective, as it travels."""

    name: str
    detail: Reason
    token: tuple[int, ...] | None


class WireFramework(NamedTuple):
    """Another framework's arrays, as they are named.

    Attributes:
        name: the framework's.
        on_gpu: they lie on GPUs.
    """

    name: str
    on_gpu: bool = False


class WireCall(NamedTuple):
    """A call, as it travels.

    Attributes:
        signature: with a `WireKind`, frameworks by name, sites for the path, and a site for a merge function's code.
        site: where it was called.
    """

    signature: tuple[Any, ...]
    site: Site


@functools.lru_cache(maxsize=4096)
def portable(file: str) -> str:
    """Return a file's name from the entry of ``sys.path``, or the working directory, that it lies under."""
    best = ""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109  (a string is all that is needed)
        prefix = os.path.join(os.path.abspath(entry), "")  # noqa: PTH100, PTH118  (and quick)
        if file.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return file[len(best) :]


@functools.lru_cache(maxsize=4096)
def resolved(file: str) -> str:
    """Return the file of this machine that a portable name means; the name itself where there is none."""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109
        path = os.path.join(os.path.abspath(entry), file)  # noqa: PTH100, PTH118
        if os.path.isfile(path):  # noqa: PTH113
            return path
    return file


def site_of(code: CodeType, offset: int) -> Site:
    """Return the place of an instruction, as it travels."""
    found: Place = place(code, offset)
    return Site(portable(code.co_filename), found.line, found.column, location(code, offset).function)


def to_wire(call: Call) -> WireCall:
    """Return a call as it travels."""
    signature, code, offset = call
    fields = list(signature)
    fields[KIND] = WireKind(signature[KIND].name, signature[KIND].detail, signature[KIND].token)
    if isinstance(signature[DETAIL], FunctionKey):
        fields[DETAIL] = _wire_function(signature[DETAIL])
    fields[TYPES] = _travelling(signature[TYPES])
    if signature[PATH] is not None:
        fields[PATH] = tuple(site_of(*part[:2]) for part in signature[PATH])
    return WireCall(tuple(fields), site_of(code, offset))


def _wire_function(key: FunctionKey) -> FunctionKey:
    if isinstance(key.code, CodeType):
        found = Site(portable(key.code.co_filename), key.code.co_firstlineno, 0, key.name)
        return FunctionKey(found.file, found, key.name)
    return FunctionKey("", f"{key.code.__module__}.{key.code.__qualname__}", key.name)


@functools.lru_cache(maxsize=4096)
def from_wire(call: WireCall) -> Call:
    """Return a call that travelled; equal places give the same code object."""
    fields = list(call.signature)
    fields[KIND] = _kind(fields[KIND])
    detail = fields[DETAIL]
    if isinstance(detail, FunctionKey) and isinstance(detail.code, Site):
        fields[DETAIL] = FunctionKey(detail.file, _function(detail.code), detail.name)
    marks = fields[TYPES]
    fields[TYPES] = _mark(marks) if type(marks) is not tuple else tuple(map(_mark, marks))
    if fields[PATH] is not None:
        fields[PATH] = tuple((*code_of(site), resolved(site.file)) for site in fields[PATH])
    return (tuple(fields), *code_of(call.site))


def _mark(mark: Any) -> Any:
    if not isinstance(mark, WireFramework):
        return mark
    return _gpu_framework(mark.name) if mark.on_gpu else _framework(mark.name)


@functools.cache
def _gpu_framework(name: str) -> DeviceType:
    return next(kind for kind in frameworks.TYPES.values() if kind.name == name)


@functools.cache
def _framework(name: str) -> HostType:
    """Return something that is called as the framework is; it need not be installed here."""
    return HostType(ModuleType(name))


@functools.cache
def _kind(wire: WireKind) -> Kind:
    known = {kind.name: kind for kind in vars(kinds).values() if isinstance(kind, Kind)}
    return known.get(wire.name) or Kind(wire.name, wire.detail, None, token=wire.token)


@functools.lru_cache(maxsize=4096)
def code_of(site: Site) -> tuple[CodeType, int]:
    """Return a code object with an instruction at a site, and the instruction's offset."""
    source = "(" + "\n" * (site.line - 1) + " " * (site.column or 0) + "x)"
    code = compile(source, resolved(site.file), "eval")
    code = code.replace(co_name=site.function, co_qualname=site.function)
    for index, (line, _, column, _) in enumerate(code.co_positions()):
        if line == site.line and (column or site.line == 1):
            return code, 2 * index
    return code, _of_line(code, site.line)


@functools.lru_cache(maxsize=4096)
def _function(site: Site) -> CodeType:
    """Return a code object that begins at a site, as a function's does."""
    return compile("x", resolved(site.file), "eval").replace(
        co_firstlineno=site.line, co_name=site.function, co_qualname=site.function
    )


def _of_line(code: CodeType, line: int) -> int:
    return next(2 * i for i, (found, *_) in enumerate(code.co_positions()) if found == line)


class Digests:
    """The digests of calls: what must agree, in 16 bytes. A call that comes again is not described again."""

    _MOST = 4096

    def __init__(self, order_check: OrderCheck) -> None:
        self._order_check = order_check
        self._known: dict[tuple[Any, ...], tuple[bytes, CodeType]] = {}

    def of(self, call: Call) -> bytes:
        """Return the digest of a call: of what groups compare it by."""
        signature, code, offset = call
        key = (signature, id(code), offset)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._MOST:
                self._known.clear()
            fingerprint = sameness.fingerprint(self._order_check, call)
            found = self._known[key] = digest(_travelling(fingerprint)), code  # held, so that no other has its id
        return found[0]


def _travelling(part: object) -> object:
    """Return a fingerprint as it would look in any process."""
    if isinstance(part, FunctionKey):
        return _wire_function(part)
    if isinstance(part, Place):
        return Place(portable(part.file), part.line, part.column)
    if isinstance(part, Kind):
        return WireKind(part.name, part.detail, part.token)
    if isinstance(part, (HostType, DeviceType)):
        return WireFramework(part.name, on_gpu=isinstance(part, DeviceType))
    if type(part) is tuple:
        return tuple(map(_travelling, part))
    return part


def digest(value: object) -> bytes:
    """Return 16 bytes for a value, by its text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
