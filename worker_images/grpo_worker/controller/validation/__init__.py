"""Validation: scores of weight versions on prompts that are not trained on."""
