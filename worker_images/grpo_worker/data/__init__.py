"""Prompts, tasks, tokenizer and micro-batches."""
