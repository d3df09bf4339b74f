"""Strategic merge of an overlay into a pod template (pure)."""

from typing import Any

# Kubernetes' own merge keys of the lists in a PodSpec; every other list is replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
}


def merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` merged with ``overlay``, without changing either; a null removes the key."""
    result = dict(base)
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merge(result[key], value)
        elif isinstance(value, list) and key in MERGE_KEYS and isinstance(result.get(key), list):
            result[key] = _merge_list(result[key], value, MERGE_KEYS[key])
        else:
            result[key] = value
    return result


def _merge_list(base: list[Any], overlay: list[Any], key: str) -> list[Any]:
    result = list(base)
    indices = {item[key]: index for index, item in enumerate(base) if key in item}
    for item in overlay:
        index = indices.get(item.get(key))
        if index is None:
            result.append(item)
        else:
            result[index] = merge(result[index], item)
    return result
