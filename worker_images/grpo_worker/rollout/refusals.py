"""Answers of engines that are no streams: refusals and failures."""

from http import HTTPStatus

import httpx

from grpo_worker.rollout.stream import REFUSED, RequestRefusedError


def is_internal(status: int) -> bool:
    """Return whether an HTTP status reports a failure of a request, and not an engine that is not ready."""
    return status >= 500 and status != HTTPStatus.SERVICE_UNAVAILABLE


async def check(response: httpx.Response) -> None:
    """Raise the error of a response that is no stream."""
    if response.status_code in REFUSED:
        await response.aread()
        raise RequestRefusedError(f"HTTP {response.status_code}: {_refusal(response)}")
    response.raise_for_status()


def _refusal(response: httpx.Response) -> str:
    """Return SGLang's error message from a refused request."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:500]
