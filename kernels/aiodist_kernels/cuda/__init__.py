# SPDX-License-Identifier: Apache-2.0
"""Reductions on GPUs: one kernel source for the simulator, for PTX and for the device.

It compiles kernels and says how to launch them; it never touches a device. Importing this package loads neither Numba
nor CUDA. Its modules, each of which imports only from those above it:

    folds      the fold of one vector of lanes, written once for the compiler and for the simulator
    forms      which kernels there are, and the tables by which work is dealt out to their threads
    simulated  what a kernel calls, for the simulator
    provider   the one file that chooses who compiles for CUDA
    kernels    how threads go over leaves and buffers
    compiled   what a kernel calls, for the compiler; its PTX
"""
