"""Process: trainer rank and its sidecar. Publishes and sends versions."""
