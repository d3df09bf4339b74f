"""kopf handlers, the work queue and the metrics of the operator."""
