"""How bytes move: process groups, CUDA IPC, NIXL."""
