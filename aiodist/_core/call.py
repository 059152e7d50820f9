"""Calls and call sites: what a replica asks for, and from where, as plain data that is cheap to compare.

A `Call` says what one collective asks for. It holds only strings, numbers and tuples, no arrays, types or code of the
program, so it can be compared between processes and written as JSON. Calls are cached (the same value requested in the
same way gives the same object), so equal calls are usually identical.

A call site is kept as the caller's code object and instruction offset, which costs 0.1 µs. It becomes a `Place` only
when two of them are not identical, or when a report is written. Two call sites are the same place when file, line and
column agree: a line of a ``finally`` block has several offsets, and a module loaded twice has two code objects.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

from aiodist._core.terms import Location, Reason
from aiodist._core.wire import File

LEAF: Final = "\x00"
"""Stands for each leaf in `Call.structure`."""

ON_A_GPU: Final = " on a GPU"
"""The end of the word in `Call.arrays` for an array that lies on a GPU."""

MESSAGE: Final = "send_recv"
"""The kind of a collective of two: one sends, the other receives."""

_LONGEST_VALUE = 100


class OrderCheck(enum.StrEnum):
    """What makes two calls the same collective, besides kind, op, structure, shapes and dtypes."""

    CALL_SITE = "call_site"
    CALL_PATH = "call_path"
    SIGNATURE = "signature"

    @classmethod
    def parse(cls, value: str) -> OrderCheck:
        """Return the member named by ``value``.

        Raises:
            ValueError: ``value`` names none.
        """
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(str(member)) for member in cls)
            raise ValueError(f"order_check must be one of {known}, got {value!r}") from None


class Place(NamedTuple):
    """The place of an instruction: its line from 1, its column from 0 (None if Python does not know it), its function.

    Two calls come from the same call site when their files, lines and columns agree.
    """

    file: File
    line: int
    column: int | None
    function: str

    @property
    def location(self) -> Location:
        """The same place as a `Location`, for reports."""
        return Location(self.file, self.line, self.function)


Site: TypeAlias = tuple[Any, int]
"""A caller's code object and the offset in bytes of the instruction in it; or a `Place` and 0."""

_places: dict[tuple[str, CodeType, int], Place] = {}


def place(code: CodeType | Place, offset: int) -> Place:
    """Return the place of the instruction at ``offset`` (in bytes, like ``frame.f_lasti``)."""
    if isinstance(code, Place):
        return code
    key = (code.co_filename, code, offset)  # code objects of two files can be equal
    found = _places.get(key)
    if found is None:
        found = _places[key] = _find_place(code, offset)
    return found


def _find_place(code: CodeType, offset: int) -> Place:
    function = code.co_qualname.rpartition(".<locals>.")[2]
    for index, (line, _, column, _) in enumerate(code.co_positions()):
        if index == offset // 2:
            return Place(code.co_filename, line or code.co_firstlineno, column, function)
    return Place(code.co_filename, code.co_firstlineno, None, function)


_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120  (quicker to import)
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_PROGRAMS = ("_demos", "_tools")
_LOOPS = tuple(f"{os.sep}{name}" for name in ("asyncio/", "anyio/", "trio/", "uvloop/", "contextlib.py"))


@lru_cache(maxsize=4096)
def is_of_the_program(file: str) -> bool:
    """Return whether a file belongs to the program, not to aiodist or an event loop."""
    if file.startswith(_OWN):
        return file.removeprefix(_OWN).startswith(_PROGRAMS)
    return not (file.startswith(_STANDARD) and any(name in file for name in _LOOPS))


class Function(NamedTuple):
    """A merge function, with name and place for texts; two are the same if the digests of their code are equal."""

    name: str
    file: File
    line: int
    digest: str


def code_digest(code: CodeType) -> str:
    """Return a digest of some code. Equal code has equal digests in all processes that run the same Python."""
    from hashlib import blake2b  # for several workers alone

    found = blake2b(code.co_code, digest_size=12)
    for constant in code.co_consts:
        found.update((code_digest(constant) if isinstance(constant, CodeType) else repr(constant)).encode())
    found.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_firstlineno)).encode())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective asks for: everything that must agree on every replica, except the call site.

    Attributes:
        kind: ``all_reduce``, ``barrier`` and so on.
        op: the reduce op's name, e.g. ``SUM``; None where there is none.
        axis: the axis of each leaf (of an all_to_all, its two axes), counted from the front; None where there is none.
        source: the id of the replica whose value counts (the root, where a kind has one); None where there is none.
        function: the merge function; None where there is none.
        members: the ids in a group that the call makes; None if it makes none.
        subject: the number of the variable that the call is about; None if it is about none.
        name: stands in for the call site.
        structure: the nest as text, with `LEAF` for every leaf; None for a single leaf, and where there is no value.
        paths: the key path of every leaf, e.g. ``['w'][0]``.
        shapes: of every leaf; None stands for a size that is not compared.
        dtypes: of every leaf, by name in native byte order; for a Python number its type.
        arrays: what each leaf is: ``array`` (of NumPy), ``scalar`` (of NumPy), ``number`` (of Python), ``slices``
            (`IndexedSlices`), or the name of a framework, with `ON_A_GPU` behind it where it lies there.
        arguments: of a merge function: how many are positional, and the names of the others; None where there is none.
        role: what this side of it is called, where sides differ, e.g. ``send(dst=1)``; not compared.
    """

    kind: str
    op: str | None = None
    axis: tuple[Any, ...] | None = None
    source: int | None = None
    function: Function | None = None
    members: tuple[int, ...] | None = None
    subject: str | None = None
    name: str | None = None
    structure: str | None = None
    paths: tuple[str, ...] = ()
    shapes: tuple[tuple[int | None, ...], ...] | None = None
    dtypes: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    arguments: tuple[int, tuple[str, ...]] | None = None
    role: str = field(default="", compare=False)

    @property
    def leaves(self) -> list[tuple[tuple[int | None, ...], str, str]]:
        """Shape, dtype and array type of every leaf."""
        return list(zip(self.shapes or (), self.dtypes, self.arrays, strict=True))

    def __str__(self) -> str:
        """Return kind and arguments as a person reads them: ``all_reduce(SUM, float32[3])``."""
        shown = [self.op] if self.op is not None else []
        if self.shapes is not None:
            shown.append(self._value_text())
        shown += self._detail_texts()
        if self.name is not None:
            shown.append(f"name={self.name!r}")
        kind, _, own = (self.role or self.kind).partition("(")
        return f"{kind}({', '.join([*shown, *filter(None, [own.removesuffix(')')])])})"

    def _value_text(self) -> str:
        texts = [leaf_text(*leaf) for leaf in self.leaves]
        if self.structure is None:
            return texts[0]
        between = self.structure.split(LEAF)
        text = "".join([part for pair in zip(between, [*texts, ""], strict=True) for part in pair])
        return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 2]} … ({len(texts)} leaves)"

    def _detail_texts(self) -> list[str]:
        if self.source is not None:
            return [f"source={self.source}"]
        if self.function is not None:
            return [self.function.name]
        if self.members is not None:
            return [str(list(self.members))]
        if self.axis is None:
            return []
        alike = len(set(self.axis)) == 1
        if alike and isinstance(self.axis[0], tuple):
            return [f"split_axis={self.axis[0][0]}, concat_axis={self.axis[0][1]}"]
        return [f"axis={self.axis[0] if alike else self.axis}"]


def leaf_text(shape: tuple[int | None, ...], dtype: str, array: str) -> str:
    """Return a leaf as ``float32[3]``; a Python number as ``float``; a NumPy scalar as ``np.float32``.

    Rows of a whole of that shape are ``IndexedSlices(float32[1000, 16])``, a PyTorch tensor is ``torch.float32[3]``.
    """
    if array == "number":
        return dtype
    if array == "scalar":
        return f"np.{dtype}"
    text = f"{dtype}[{', '.join('*' if size is None else str(size) for size in shape)}]"
    if array == "array":
        return text
    if array == "slices":
        return f"IndexedSlices({text})"
    return f"{array.removesuffix(ON_A_GPU)}.{text}{ON_A_GPU if array.endswith(ON_A_GPU) else ''}"


class Post(NamedTuple):
    """A collective that one replica has issued: what it asks for, its call site and, if recorded, its callers'."""

    call: Call
    path: tuple[Place, ...]

    @property
    def location(self) -> Location:
        """The call site as a `Location`, for reports."""
        return self.path[0].location


def compare(a: Call, b: Call) -> Reason | None:  # noqa: C901, PLR0911  (one return a field)
    """Return the first field in which two calls differ, ignoring call sites; None if they are the same."""
    if a is b or a == b:
        return None
    if a.kind != b.kind or a.subject != b.subject:
        return Reason.KIND
    if a.name != b.name:
        return Reason.NAME
    if a.op != b.op:
        return Reason.REDUCE_OP
    if a.axis != b.axis and _ranks(a) == _ranks(b):  # else the axes were counted from the end of other shapes
        return Reason.AXIS
    if a.source != b.source:
        return Reason.SOURCE
    if a.members != b.members:
        return Reason.GROUP
    if a.function != b.function:
        return Reason.MERGE_FN
    if a.structure != b.structure or a.arguments != b.arguments:
        return Reason.STRUCTURE
    if a.shapes != b.shapes:
        return Reason.SHAPE
    if _dtypes(a) != _dtypes(b):
        return Reason.DTYPE
    return Reason.DEVICE


def _ranks(call: Call) -> list[int]:
    return [len(shape) for shape in call.shapes or ()]


_DTYPES_OF_NUMBERS = {"int": "int64", "float": "float64", "complex": "complex128"}


def _dtypes(call: Call) -> list[str]:
    """Return the dtypes, with Python's numbers as the dtypes that NumPy gives them."""
    return [_DTYPES_OF_NUMBERS.get(dtype, dtype) for dtype in call.dtypes]


def difference(order_check: OrderCheck, a: Post, b: Post) -> Reason | None:
    """Return the first field in which two posts differ, comparing call sites as the order check says."""
    if fingerprint(order_check, a) == fingerprint(order_check, b):
        return None
    return compare(a.call, b.call) or Reason.CALL_SITE


def fingerprint(order_check: OrderCheck, post: Post) -> Hashable:
    """Return everything that must agree for posts to be the same collective, as one hashable value."""
    if post.call.name is not None or order_check is OrderCheck.SIGNATURE:
        return post.call
    sites = post.path if order_check is OrderCheck.CALL_PATH else post.path[:1]
    return post.call, tuple(site[:3] for site in sites)


def path_of(sites: Iterable[Site]) -> tuple[Place, ...]:
    """Return the places of some call sites."""
    return tuple(place(code, offset) for code, offset in sites)


def digest(order_check: OrderCheck, posts: Sequence[Post]) -> bytes:
    """Return a digest of 16 bytes, equal for equal fingerprints of some posts, also in other processes."""
    from hashlib import blake2b

    found = blake2b(digest_size=16)
    for post in posts:
        found.update(repr(fingerprint(order_check, post)).encode())
    return found.digest()
