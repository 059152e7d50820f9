# SPDX-License-Identifier: Apache-2.0
"""What compiled kernels must look like, as text and to the assembler."""

from __future__ import annotations

import importlib.util
import itertools
import re
from typing import TYPE_CHECKING

from aiodist_kernels.rules import lane, product_is_fused

if TYPE_CHECKING:
    from aiodist_kernels.cuda.forms import Form


def blocks_of(ptx: str) -> list[list[str]]:
    """Cut a program's text into stretches without a jump in or out."""
    found: list[list[str]] = [[]]
    for line in map(str.strip, ptx.splitlines()):
        if line.startswith("$") or re.match(r"(@!?%p\d+ )?bra", line):
            found.append([])
        found[-1].append(line)
    return found


def check_text(form: Form, ptx: str, capability: tuple[int, int]) -> None:
    """Vectors move 128 bits at a time and nothing else; no local memory, no calls, nothing fused that must not be."""
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert "ftz" not in ptx
    assert "approx" not in ptx
    assert not re.search(r"\.local|depot|\bcall\b", ptx)
    in_vectors = [block for block in blocks_of(ptx) if any(_is_whole(line, form) for line in block)]
    assert in_vectors
    stores = [line for block in in_vectors for line in block if line.startswith("st.global")]
    assert stores
    for line in itertools.chain.from_iterable(in_vectors):
        if re.match(r"(ld|st)\.global", line) and not line.startswith("ld.global.nc.u64"):  # words of the table
            assert _is_whole(line, form), line
    assert not may_be_fused(ptx)
    assert ("fma" in ptx) is (form.rule.grain > 1 and product_is_fused(form.rule.accumulator))


def _is_wide(line: str) -> bool:
    return bool(re.match(r"(ld|st)\.global\.(v4\.[bfus]32|v2\.[bfus]64)\s", line))


def _is_whole(line: str, form: Form) -> bool:
    """Whether an access moves a whole vector; one of results that are narrower than the buffers has fewer bits."""
    narrow = form.width * lane(form.rule.result).itemsize
    found = re.match(r"st\.global(?:\.v(\d))?\.[bfus](\d+)\s", line)
    return _is_wide(line) or (found is not None and narrow < 16 and int(found[1] or 1) * int(found[2]) == 8 * narrow)


def may_be_fused(ptx: str) -> bool:
    """Whether a sum takes a product where neither says how it is rounded: an assembler may fuse the two."""
    products = set(re.findall(r"mul\.f\d+x?2?\s+(%\w+)", ptx))
    sums = re.findall(r"(?:add|sub)\.f\d+x?2?\s+%\w+, (%\w+), (%\w+)", ptx)
    return any(products & set(operands) for operands in sums)


def assemble(ptx: str, capability: tuple[int, int]) -> None:
    """Make machine code of a program, as a driver would, where there is an assembler; its registers must suffice."""
    architecture = f"sm_{capability[0]}{capability[1]}"
    if not importlib.util.find_spec("cuda"):
        return
    log = _link(ptx, architecture)
    newer, older = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", ", 0 stack, "  # CUDA 13.0's
    assert newer in log or (older in log and ", 0 bytes lmem" in log), log


def _link(ptx: str, architecture: str) -> str:
    nvjitlink = importlib.import_module("cuda.bindings.nvjitlink")
    code = ptx.encode()
    linker = nvjitlink.create(3, [f"-arch={architecture}", "-verbose", "-Xptxas=-v"])
    nvjitlink.add_data(linker, nvjitlink.InputType.PTX, code, len(code), "kernel")
    nvjitlink.complete(linker)
    log = bytearray(nvjitlink.get_info_log_size(linker))
    nvjitlink.get_info_log(linker, log)
    nvjitlink.destroy(linker)
    return log.decode()
