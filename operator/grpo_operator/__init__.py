"""Kubernetes operator for GRPO post-training with Megatron-Core and SGLang."""

__version__ = "0.1.0"
