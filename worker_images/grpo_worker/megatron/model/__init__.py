"""Megatron-Core modules: configuration, layer specification, heads."""
