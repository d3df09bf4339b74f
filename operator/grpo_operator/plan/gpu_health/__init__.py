"""From what agents report of their GPUs to strikes, quarantine and the state of nodes (pure)."""
