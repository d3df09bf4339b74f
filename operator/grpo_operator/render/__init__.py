"""Pure builders of the Kubernetes objects that a plan asks for."""
