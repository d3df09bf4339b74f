"""Sinks of a run beside the job's own record: TensorBoard, W&B, MLflow, trackio."""
