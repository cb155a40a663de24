"""The GPU executor: the decoder on Triton's kernels, its metadata, graphs and resident images."""
