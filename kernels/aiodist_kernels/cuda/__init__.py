# SPDX-License-Identifier: Apache-2.0
"""Reductions on GPUs: kernels compiled to PTX.

It compiles kernels and describes their launches; it never uses a device. Importing this package loads neither Numba
nor CUDA. Its modules, each of which imports only from those above it:

- `forms`: the forms of kernels, and the tables that distribute work over their threads
- `compiled`: what a thread does, in LLVM instructions; how threads iterate over leaves and buffers; the kernels' PTX
"""
