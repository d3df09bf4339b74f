"""Pure builders of the Kubernetes objects of a plan."""
