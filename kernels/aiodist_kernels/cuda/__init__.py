# SPDX-License-Identifier: Apache-2.0
"""Reductions on GPUs: one kernel source for the simulator, for PTX and for the device.

It compiles kernels and says how to launch them; it never touches a device. Importing this package
loads neither Numba nor CUDA.
"""
