"""Formatting of errors for users."""

from grpo_operator.api.errors import last_error_line

LONGEST = 1000  # characters of a message in status


def one_line(error: BaseException) -> str:
    """Return an error as one line; for a failed Ray task, that of the exception which the task raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    text = str(error)
    if "Traceback" in text:
        return last_error_line(text)
    return f"{type(error).__name__}: {' '.join(text.split())}"[:LONGEST]
