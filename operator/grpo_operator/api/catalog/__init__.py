"""Catalog of known GPUs and model architectures."""
