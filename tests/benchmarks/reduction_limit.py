# SPDX-License-Identifier: Apache-2.0
"""What the machine can do: one pass in C over n float32 buffers, with plain and non-temporal stores."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

SOURCE = r"""
#include <immintrin.h>
#include <stddef.h>
#if defined(__AVX512F__)
  #define LANES 16
  typedef __m512 vector;
  #define load(p) _mm512_loadu_ps(p)
  #define plus(x, y) _mm512_add_ps(x, y)
  #define store_plain(p, x) _mm512_storeu_ps(p, x)
  #define store_streaming(p, x) _mm512_stream_ps(p, x)
#elif defined(__AVX__)
  #define LANES 8
  typedef __m256 vector;
  #define load(p) _mm256_loadu_ps(p)
  #define plus(x, y) _mm256_add_ps(x, y)
  #define store_plain(p, x) _mm256_storeu_ps(p, x)
  #define store_streaming(p, x) _mm256_stream_ps(p, x)
#else
  #define LANES 4
  typedef __m128 vector;
  #define load(p) _mm_loadu_ps(p)
  #define plus(x, y) _mm_add_ps(x, y)
  #define store_plain(p, x) _mm_storeu_ps(p, x)
  #define store_streaming(p, x) _mm_stream_ps(p, x)
#endif

#define DEFINE(N, KIND) \
    void sum_##KIND##_##N(float *out, const float **b, size_t size) { \
        const float *p[N]; \
        for (int k = 0; k < N; k++) p[k] = b[k]; \
        for (size_t i = 0; i < size; i += LANES) { \
            vector total = load(p[0] + i); \
            _Pragma("GCC unroll 16") \
            for (int k = 1; k < N; k++) total = plus(total, load(p[k] + i)); \
            store_##KIND(out + i, total); \
        } \
        _mm_sfence(); \
    }

DEFINE(2, plain) DEFINE(4, plain) DEFINE(8, plain)
DEFINE(2, streaming) DEFINE(4, streaming) DEFINE(8, streaming)
"""


class Limit:
    """Sums in C, for 2, 4 and 8 buffers whose size is a multiple of 16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def sum(self, buffers: Sequence[np.ndarray], out: np.ndarray, kind: str) -> Callable[[], None]:
        """Return a call that sums `buffers` into `out`, which must be 64-byte aligned; `kind`: plain or streaming."""
        function = self._library[f"sum_{kind}_{len(buffers)}"]
        places = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
        address, size = ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(out.size)
        return lambda: function(address, places, size)


def compile_limit() -> Limit | None:
    """Compile the C code; None where there is no compiler for it, or another kind of processor."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "limit.c"), Path(folder, "limit.so")
        source.write_text(SOURCE)
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        return Limit(ctypes.CDLL(str(library)))
