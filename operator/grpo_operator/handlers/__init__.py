"""kopf handlers, the reconcile loop and its work queue, and the operator's metrics."""
