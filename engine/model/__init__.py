"""One config-driven decoder; knows tensors and configuration, not requests or adapters' names."""
