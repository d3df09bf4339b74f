"""Traces of training steps, and diagnosis of hanging ranks."""
