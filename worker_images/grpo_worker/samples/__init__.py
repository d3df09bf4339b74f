"""Parquet files with the samples of each step."""
