"""Calls and call sites: what a replica requests, and from where, as plain data that is cheap to compare.

A `Call` describes the request for one collective in strings, numbers and tuples, without arrays, types or code of the
program, so it can be compared between processes and written as JSON. Calls are cached (the same value requested in the
same way gives the same object), so equal calls are usually identical.

A call site is stored as the caller's code object and instruction offset, which costs 0.1 µs. It becomes a `Place` only
when two call sites are not identical, or for a report. Two call sites are the same place when file, line and column
agree: a line of a ``finally`` block has several offsets, and a module loaded twice has two code objects.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice
from math import prod
from types import CodeType
from typing import Any, Final, NamedTuple

from aiodist._core.terms import Location, Reason
from aiodist._core.wire import File

LEAF: Final = "\x00"
"""Stands for each leaf in `Call.structure`."""

ON_A_GPU: Final = " on a GPU"
"""The suffix in `Call.arrays` of an array on a GPU."""

MESSAGE: Final = "send_recv"
"""The kind of a collective of two members, of which one sends and the other receives."""

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


def place(code: CodeType | Place, offset: int) -> Place:
    """Return the place of the instruction at ``offset`` (in bytes, like ``frame.f_lasti``)."""
    return code if isinstance(code, Place) else _place(code.co_filename, code, offset)


@cache
def _place(file: str, code: CodeType, offset: int) -> Place:  # code objects of two files can be equal
    line, _, column, _ = next(islice(code.co_positions(), offset // 2, None), (None, None, None, None))
    return Place(file, line or code.co_firstlineno, column, code.co_qualname.rpartition(".<locals>.")[2])


_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120  (quicker to import)
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_PROGRAMS = ("_demos", "_tools")
_KERNELS = f"{os.sep}aiodist_kernels{os.sep}"
_PACKAGES = f"-packages{os.sep}"  # the end of the name of the folder with what is installed
_LOOPS = (*(f"{name}{os.sep}" for name in ("asyncio", "anyio", "trio", "uvloop")), "contextlib.py")


@lru_cache(maxsize=4096)
def is_of_the_program(file: str) -> bool:
    """Return whether a file belongs to the program, not to aiodist or an event loop."""
    if file.startswith(_OWN):
        return file.removeprefix(_OWN).startswith(_PROGRAMS)
    if _KERNELS in file:
        return False
    _, library, name = file.rpartition(_PACKAGES if _PACKAGES in file else _STANDARD)
    return not (library and name.startswith(_LOOPS))


class Function(NamedTuple):
    """A merge function, with name and place for reports; two are the same if the digests of their code are equal."""

    name: str
    file: File
    line: int
    digest: str


def code_digest(code: CodeType) -> str:
    """Return a digest of some code. Equal code has equal digests in all processes that run the same Python."""
    from hashlib import blake2b  # seldom needed

    found = blake2b(code.co_code, digest_size=12)
    for constant in code.co_consts:
        found.update((code_digest(constant) if isinstance(constant, CodeType) else repr(constant)).encode())
    found.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_firstlineno)).encode())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Call:
    """The request for a collective: everything that must agree on every replica, except the call site.

    Fields that do not apply to a kind are None or empty.
    """

    kind: str  # `all_reduce`, `barrier` and so on
    op: str | None = None  # the reduce op's name, e.g. `SUM`
    axis: tuple[Any, ...] | None = None  # of each leaf (of an all_to_all, its two axes), counted from the front
    source: int | None = None  # the root: the id of the replica whose value counts
    function: Function | None = None  # the merge function
    members: tuple[int, ...] | None = None  # the ids in a group that the call makes
    subject: str | None = None  # the variable that the call is about
    name: str | None = None  # stands in for the call site
    structure: str | None = None  # the nest as text, with `LEAF` for every leaf; None for a single leaf
    paths: tuple[str, ...] = ()  # the key path of every leaf, e.g. `['w'][0]`
    shapes: tuple[tuple[int | None, ...], ...] | None = None  # of every leaf; a size that is None is not compared
    dtypes: tuple[str, ...] = ()  # of every leaf, by name in native byte order; for a Python number its type
    # The type of every leaf: `array` or `scalar` (of NumPy), `number` (of Python), `slices` (`IndexedSlices`), or the
    # name of a framework, with the suffix `ON_A_GPU` for an array on a GPU.
    arrays: tuple[str, ...] = ()
    arguments: tuple[int, tuple[str, ...]] | None = None  # of a merge function: how many positional ones, and the names
    role: str = field(default="", compare=False)  # the name of this side if sides differ, e.g. `send(dst=1)`

    @property
    def leaves(self) -> list[tuple[tuple[int | None, ...], str, str]]:
        """Shape, dtype and array type of every leaf."""
        return list(zip(self.shapes or (), self.dtypes, self.arrays, strict=True))

    @property
    def nbytes(self) -> int | None:
        """The bytes of a value; None if the call does not determine them."""
        if any(None in shape or array == "slices" for shape, _, array in self.leaves):
            return None
        return sum(prod(size or 0 for size in shape) * _itemsize(dtype) for shape, dtype, _ in self.leaves)

    def __str__(self) -> str:
        """Return kind and arguments as a person reads them: ``all_reduce(SUM, float32[3])``."""
        kind, _, arguments = (self.role or self.kind).partition("(")
        name = "" if self.name is None else f"name={self.name!r}"
        parts = (self.op, self._value_text(), self._detail_text(), name, arguments.removesuffix(")"))
        return f"{kind}({', '.join(filter(None, parts))})"

    def _value_text(self) -> str:
        if self.shapes is None:
            return ""
        texts = [leaf_text(*leaf) for leaf in self.leaves]
        if self.structure is None:
            return texts[0]
        between = self.structure.split(LEAF)
        text = "".join([part for pair in zip(between, [*texts, ""], strict=True) for part in pair])
        return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 2]} … ({len(texts)} leaves)"

    def _detail_text(self) -> str:
        if self.source is not None:
            return f"source={self.source}"
        if self.function is not None:
            return self.function.name
        if self.members is not None:
            return str(list(self.members))
        if self.axis is None:
            return ""
        same = len(set(self.axis)) == 1
        if same and isinstance(self.axis[0], tuple):
            return f"split_axis={self.axis[0][0]}, concat_axis={self.axis[0][1]}"
        return f"axis={self.axis[0] if same else self.axis}"


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return {"bool": 1, "complex": 16}.get(dtype, 8) if bits is None else -(-int(bits[0]) // 8)


def leaf_text(shape: tuple[int | None, ...], dtype: str, array: str) -> str:
    """Return a leaf as text.

    A NumPy array is ``float32[3]``, a NumPy scalar ``np.float32``, a Python number ``float``, a PyTorch tensor
    ``torch.float32[3]``; `IndexedSlices` are ``IndexedSlices(float32[1000, 16])``, with their dense shape.
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
    """A collective that one replica has issued: the call, its call site and, if recorded, those of its callers."""

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
    if a.axis != b.axis and _ndims(a) == _ndims(b):  # otherwise a negative axis differs with the shape
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


def _ndims(call: Call) -> list[int]:
    return [len(shape) for shape in call.shapes or ()]


_DTYPES_OF_NUMBERS = {"int": "int64", "float": "float64", "complex": "complex128"}


def _dtypes(call: Call) -> list[str]:
    """Return the dtypes; for Python's numbers, those that NumPy gives them."""
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


def path_of(sites: Iterable[tuple[Any, int]]) -> tuple[Place, ...]:
    """Return the places of call sites, each a code object and an offset, or a `Place` and 0."""
    return tuple(place(code, offset) for code, offset in sites)


def digest(order_check: OrderCheck, posts: Sequence[Post]) -> bytes:
    """Return a digest of 16 bytes, which is equal in all processes if the fingerprints of the posts are equal."""
    from hashlib import blake2b

    found = blake2b(digest_size=16)
    for post in posts:
        found.update(repr(fingerprint(order_check, post)).encode())
    return found.digest()
