"""Stand-in for the API server that holds the Secrets of one namespace."""

import base64
import copy
from http import HTTPStatus
from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.keys import Epochs
from grpo_operator.api.names import EPOCH_SECRET


class SecretsApi:
    """The Secrets of one namespace. ``refused``: verbs that the account lacks."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.refused: set[str] = set()
        self.asked: list[str] = []

    async def get(self, group: str, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        self._allow(f"get {name}")
        return copy.deepcopy(self.secrets.get(name))

    async def create(self, group: str, plural: str, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        self._allow(f"create {name}")
        if name in self.secrets:
            raise ApiException(status=HTTPStatus.CONFLICT)
        self.secrets[name] = copy.deepcopy(manifest)
        self.secrets[name]["metadata"]["resourceVersion"] = "1"

    async def patch(self, group: str, plural: str, change: dict[str, Any], content: str) -> None:
        name = change["metadata"]["name"]
        self._allow(f"patch {name}")
        assert change["metadata"]["resourceVersion"] == self.secrets[name]["metadata"]["resourceVersion"]
        self.secrets[name]["data"] |= change["data"]
        self.secrets[name]["metadata"]["annotations"] = {}

    def _allow(self, request: str) -> None:
        self.asked.append(request)
        if request.split(maxsplit=1)[0] in self.refused:
            raise ApiException(status=HTTPStatus.FORBIDDEN)

    def content(self, name: str) -> dict[str, str]:
        data = self.secrets[name]["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    @property
    def epochs(self) -> Epochs:
        return Epochs.read(self.content(EPOCH_SECRET)["epoch"])
