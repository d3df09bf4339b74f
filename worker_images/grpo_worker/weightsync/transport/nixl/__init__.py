"""RDMA reads of staged versions with NIXL."""
