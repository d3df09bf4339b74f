"""What both ends agree on: manifests, tiling, transfer plan, byte ranges, digests. Pure."""
