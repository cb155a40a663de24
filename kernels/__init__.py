"""Tensors in, tensors out; knows nothing of requests, adapters' names or configuration files."""
