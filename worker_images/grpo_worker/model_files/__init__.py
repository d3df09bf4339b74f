"""Hugging Face model directories: configuration, special tokens, checks."""
