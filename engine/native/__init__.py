"""The native executor: the base, its KV cache and its images packed for `kernels.cpu`."""
