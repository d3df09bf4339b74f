"""Shared by all processes: manifests, tiling, transfer plan, byte ranges, digests. No I/O, no processes."""
