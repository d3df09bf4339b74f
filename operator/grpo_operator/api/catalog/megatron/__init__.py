"""Fields of Megatron-Core's configuration: which exist, and which grpo-operator sets by itself."""
