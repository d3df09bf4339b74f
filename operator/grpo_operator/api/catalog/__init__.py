"""Known GPUs and model architectures."""
