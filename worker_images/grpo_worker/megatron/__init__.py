"""Megatron-Core models of the supported families."""

from grpo_worker.megatron import environment

environment.prepare()
