"""Megatron-Core models of the supported families."""
