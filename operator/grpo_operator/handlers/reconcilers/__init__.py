"""One reconciler per kind, and the context and admission that they share."""
