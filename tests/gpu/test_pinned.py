"""Page-locked memory of the host: what is given back is given out again, and arrays in it keep it."""

from __future__ import annotations

import ctypes
import gc

import numpy as np

from aiodist._gpu.pinned import HostPool, array_of


def test_memory_is_given_out_again_once_the_last_array_in_it_is_gone() -> None:
    locked: list[ctypes.Array] = []

    def lock(nbytes: int) -> int:
        locked.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(locked[-1])

    pool = HostPool(lock)
    whole = array_of(pool.take(5000), (5000,), np.dtype(np.uint8))
    part = whole[1:].view(np.uint8)
    del whole
    gc.collect()
    other = pool.take(8000)
    assert other.address == ctypes.addressof(locked[1])
    part[:] = 7
    assert locked[0].raw[1:5000] == bytes([7]) * 4999
    del part
    gc.collect()
    assert pool.take(4097).address == ctypes.addressof(locked[0])
    assert [len(buffer) for buffer in locked] == [8192, 8192]
