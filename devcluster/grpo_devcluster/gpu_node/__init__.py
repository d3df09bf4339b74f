"""The devcluster on a machine with GPUs and without a network: what it is packed from, and its check."""
