"""Transports of weights between processes: process groups, CUDA IPC, NIXL."""
