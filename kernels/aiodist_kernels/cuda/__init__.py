# SPDX-License-Identifier: Apache-2.0
"""Reductions on GPUs: kernels compiled to PTX.

It compiles kernels and says how to launch them; it never touches a device. Importing this package loads neither Numba
nor CUDA. Its modules, each of which imports only from those above it:

- `forms`: which kernels there are, and the tables by which work is dealt out to their threads
- `compiled`: what a thread does, in LLVM instructions; how threads go over leaves and buffers; the kernels' PTX
"""
