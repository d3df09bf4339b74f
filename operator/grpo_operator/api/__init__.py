"""Pydantic models of the custom resources, and definitions that all layers share."""
