"""Targets: the function that the user names on the command line, loaded as when its file is run directly.

A file's folder is first on `sys.path` while it runs, and its arguments are in `sys.argv`; ``__file__`` is its full
path. Only ``__name__`` differs from ``__main__``, so that code under ``if __name__ == "__main__"`` does not run. Nor
does a program that the file runs after the function: loading ends where it would make an event loop.

For each schedule the target is loaded again, and so are the modules beside it that it imports, so that no run depends
on what the one before has left in module variables. Installed packages are imported once.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from aiodist._checking.loop import making_loops

_EXPECTED = "expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"
_MOST_NAMES = 10


class TargetError(Exception):
    """The target cannot be checked as requested; the text is for the user."""


class TargetExitError(Exception):
    """The target ended the process with an exit code other than 0."""


class _LoadedError(BaseException):
    """A target's module has been loaded far enough; programs do not handle this exception."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.module = module


class Source:
    """A target that can be loaded again and again, with its own arguments of the command line.

    It is named as ``file.py:function`` or ``package.module:function``; anything else is a TargetError.
    """

    def __init__(self, text: str, arguments: Sequence[str]) -> None:
        where, colon, self._function = text.rpartition(":")
        if not (colon and self._function.isidentifier()):
            raise TargetError(f"{_EXPECTED}, got {text!r}{_suggestion('', text)}")
        self._arguments = list(arguments)
        self._code: CodeType | None = None
        self._before = frozenset(sys.modules)
        self._name, self._folder = where, Path.cwd()
        self._file = Path(where).absolute() if where.endswith(".py") else None  # None: a module that is imported
        if self._file is not None:
            if not self._file.is_file():
                raise TargetError(f"there is no file {where!r}")
            self._name, self._folder = self._file.stem, self._file.parent
            if self._name in self._before:
                self._name = f"checked_{self._name}"
        elif not all(part.isidentifier() for part in where.split(".")):
            raise TargetError(f"{_EXPECTED}, got {text!r}")

    def load(self) -> Callable[[], Any]:
        """Load the target again, and return it with its arguments; a TargetError if there is no such function."""
        self._forget()
        module = self._import()
        function = getattr(module, self._function, None)
        if not callable(function):
            suggestion = _suggestion(self._function, getattr(module, "__file__", None))
            raise TargetError(f"{self._name} has no function {self._function!r}{suggestion}")
        return bound(function, self._arguments)

    def _new_loop(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
        """Make a loop; or end the loading if the target has its function already, or will not have it."""
        module = sys.modules.get(self._name)
        code, name = self._code, self._function
        named = code is None or name in code.co_names or ("*",) in code.co_consts  # from … import *
        if module is not None and (not named or callable(getattr(module, name, None))):
            raise _LoadedError(module)
        return new_loop()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Set `sys.path` and `sys.argv` as they are when the target is run directly."""
        path, argv = sys.path[:], sys.argv
        if sys.path and sys.path[0] in {"", str(Path.cwd()), str(Path(argv[0]).absolute().parent)}:
            del sys.path[0]  # the folder of this command, not of the target
        sys.path.insert(0, str(self._folder))
        sys.argv = [str(self._file or self._name), *self._arguments]
        try:
            yield
        finally:
            sys.path[:], sys.argv = path, argv
            self._forget()

    def _import(self) -> ModuleType:
        try:
            with making_loops(partial(self._new_loop, asyncio.events.new_event_loop)):
                return self._import_module() if self._file is None else self._run_file(self._file)
        except _LoadedError as loaded:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "coroutine .* was never awaited")
                loaded.__traceback__ = None  # and with it the coroutine that was to be run
            module = sys.modules[self._name] = loaded.module  # importlib has removed it
            return module

    def _run_file(self, file: Path) -> ModuleType:
        if self._code is None:
            self._code = compile(file.read_bytes(), str(file), "exec")
        module = sys.modules[self._name] = ModuleType(self._name)
        module.__file__ = str(file)
        exec(self._code, module.__dict__)  # noqa: S102  (it is what the user wants run)
        return module

    def _import_module(self) -> ModuleType:
        try:
            return importlib.import_module(self._name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self._name}.".startswith(f"{error.name}."):
                raise TargetError(f"there is no module {error.name!r} in {Path.cwd()} or on the path") from error
            raise

    def _forget(self) -> None:
        """Forget the modules beside the target that it has imported."""
        for name in set(sys.modules) - self._before:
            file = Path(getattr(sys.modules[name], "__file__", None) or "/")
            beside = file.suffix == ".py" and self._folder in file.parents and "site-packages" not in file.parts
            if beside and name.partition(".")[0] not in {"aiodist", "aiodist_kernels"}:
                del sys.modules[name]


def _suggestion(name: str, file: str | None) -> str:
    """Suggest a public function of a file for a name, or list them."""
    try:
        body = ast.parse(Path(file or "").read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    functions = [each for each in names if not each.startswith("_")]
    close = difflib.get_close_matches(name, functions, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    more = ", …" if len(functions) > _MOST_NAMES else ""
    return f"; it has {', '.join(functions[:_MOST_NAMES])}{more}" if functions else ""


def bound(function: Callable[..., Any], arguments: Sequence[str]) -> Callable[[], Any]:
    """Return a function with the arguments of the command line, if it takes any; a TargetError if not these.

    ``name=value`` is passed by keyword, anything else by position. Values are read as Python literals (``[1,2]``,
    ``None``) or else as strings.
    """
    signature = inspect.signature(function)
    if not signature.parameters:
        return function
    args, kwargs = [], {}
    for text in arguments:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            kwargs[name] = _value(value)
        else:
            args.append(_value(text))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        given = f"-- {' '.join(arguments)}" if arguments else "no arguments; give them after --"
        raise TargetError(f"{name}{signature} cannot be called with {given}: {error}") from error
    return partial(function, *args, **kwargs)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
