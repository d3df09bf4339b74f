"""Health of the node's GPUs: read through NVML, judged, and exported by the pod's agent."""
