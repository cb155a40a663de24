"""Kernels for GPUs, in Triton; each is held to the plain functions of `loraplex.kernels`."""
