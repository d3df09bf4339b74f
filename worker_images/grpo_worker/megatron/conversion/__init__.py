"""Hugging Face tensors into Megatron-Core parameters and back."""
