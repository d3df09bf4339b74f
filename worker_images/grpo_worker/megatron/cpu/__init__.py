"""Megatron-Core on CPUs: an import hook and patches."""
