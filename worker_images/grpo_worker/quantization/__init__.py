"""FP8 in blocks."""
