"""Documents as a newer release would write them."""

from typing import Any

ADDED = "fieldOfTomorrow"
# Maps whose keys are not fields of the API.
_MAPS = {
    "chatTemplateKwargs",
    "gpuSeconds",
    "lostGpuSeconds",
    "megatron",
    "ncclEnv",
    "nodeSelector",
    "podTemplate",
}


def of_tomorrow(document: Any) -> Any:
    """Return a JSON document with a field of a newer release in each of its objects."""
    if isinstance(document, dict):
        inner = {key: value if key in _MAPS else of_tomorrow(value) for key, value in document.items()}
        return inner | {ADDED: "new"}
    return [of_tomorrow(item) for item in document] if isinstance(document, list) else document


def of_today(document: Any) -> Any:
    """Return a JSON document without the fields that ``of_tomorrow`` adds."""
    if isinstance(document, dict):
        return {key: of_today(value) for key, value in document.items() if key != ADDED}
    return [of_today(item) for item in document] if isinstance(document, list) else document
