"""RDMA reads by NIXL."""
