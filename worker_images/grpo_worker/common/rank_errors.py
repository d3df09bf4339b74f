"""Errors that only ranks raise. The controller, which reads them, cannot import Megatron-Core."""

from grpo_worker.common.store_problems import UnwritableStoreError


class ExportError(UnwritableStoreError):
    """An export was not written; every rank raises the same error."""


class GradientMismatchError(RuntimeError):
    """Two computations of the same gradients have different bits."""
