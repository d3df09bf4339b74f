"""A small typed client of the Kubernetes API and of KubeRay."""
