"""Formatting of errors for users."""

from collections.abc import Iterator

from grpo_operator.api.errors import last_error_line

LONGEST = 1000  # characters of a message in status


def causes_of(error: BaseException, contexts: bool = False) -> Iterator[BaseException]:
    """Return an error and what caused it, in this process, in a task of Ray, or in reads of torch.

    ``contexts``: also what was being handled when an error was raised, which need not have caused it.
    """
    pending, seen = [error], set[int]()
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        causes = [found.__cause__, getattr(found, "cause", None)]
        if contexts and not found.__suppress_context__:
            causes.append(found.__context__)
        # torch.distributed.checkpoint: rank -> exception and its stack
        failures = getattr(found, "failures", None)
        causes += [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
        pending += [cause for cause in causes if isinstance(cause, BaseException)]


def one_line(error: BaseException) -> str:
    """Return an error as one line; for a failed Ray task, that of the exception which the task raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    text = str(error)
    if "Traceback" in text:
        return last_error_line(text)
    return f"{type(error).__name__}: {' '.join(text.split())}"[:LONGEST]
