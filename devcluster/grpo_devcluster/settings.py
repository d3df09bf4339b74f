"""Addresses and names of the devcluster."""

BRIDGE = "grpo0"
GATEWAY = "10.244.0.1"  # address of the bridge, the node, the API server and CoreDNS
POD_CIDR = "10.244.0.0/24"
FAKE_POD_CIDR = "10.244.128.0/17"  # of simulated pods on KWOK's nodes; unreachable
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"
NODE = "grpo-node"
API_PORT = 6443
SERVER = f"https://{GATEWAY}:{API_PORT}"
ETCD = "http://127.0.0.1:23790"
ETCD_PEER = "http://127.0.0.1:23800"
