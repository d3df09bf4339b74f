"""Shared by all processes: manifests, tiling, transfer plan, links, digests. No I/O, no processes."""
