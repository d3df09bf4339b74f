"""Supported model families: names, shapes and mapping of their Hugging Face tensors."""
