"""Megatron-Core models of the supported families."""

from grpo_worker.megatron import cudnn

cudnn.prefer_torchs()
