"""Pydantic models of the custom resources, and what every layer knows of them."""
