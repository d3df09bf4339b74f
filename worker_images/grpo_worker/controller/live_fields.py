"""Fields of a job that may change while it runs: ``totalSteps`` and ``restartPolicy``."""

import logging
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from grpo_operator.api.errors import describe
from grpo_operator.api.messages import Message
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.restart_policy import RestartPolicySpec

log = logging.getLogger(__name__)


class _Fields(Message):
    total_steps: int = Field(ge=1)
    restart_policy: RestartPolicySpec = Field(default_factory=RestartPolicySpec)


class _JobFile(Message):
    spec: _Fields


class LiveFields:
    """The fields as the job's file has them. Kubelet writes the file again when the operator has changed it.

    All other fields of the file are those of the controller's start.
    """

    def __init__(
        self, total_steps: int, restart_policy: RestartPolicySpec | None = None, file: Path | None = None
    ) -> None:
        """``file``: None if nobody changes it."""
        self._fields = _Fields(total_steps=total_steps, restart_policy=restart_policy or RestartPolicySpec())
        self._file = file
        self._seen: tuple[int, int, int] | None = None  # identity of the contents that were read last

    @classmethod
    def of(cls, spec: GRPOJobSpec, file: Path | None = None) -> Self:
        """Return the fields of ``spec``, which was read from ``file``."""
        return cls(spec.total_steps, spec.restart_policy, file)

    @property
    def total_steps(self) -> int:
        """Return ``totalSteps`` as read last."""
        return self._fields.total_steps

    @property
    def restart_policy(self) -> RestartPolicySpec:
        """Return ``restartPolicy`` as read last; the same object as long as it does not change."""
        return self._fields.restart_policy

    def current(self, spec: GRPOJobSpec) -> GRPOJobSpec:
        """Return ``spec`` with the fields as read last."""
        changed = {"total_steps": self.total_steps, "restart_policy": self.restart_policy}
        return spec.model_copy(update=changed)

    def look(self) -> None:
        """Read the fields again if the file is another one. A file that has not changed costs one stat.

        A file that cannot be read, or is wrong, changes nothing.
        """
        if self._file is None:
            return
        try:
            found = self._file.stat()  # follows the links that kubelet replaces
            identity = found.st_ino, found.st_mtime_ns, found.st_size
            if identity == self._seen:
                return
            read = _JobFile.model_validate_json(self._file.read_bytes()).spec
        except OSError as error:  # kubelet may be replacing it
            log.warning("%s cannot be read, and is read again: %s", self._file, error)
            return
        except ValidationError as error:
            log.warning("%s is wrong, and changes nothing: %s", self._file, describe(error, self._file.name))
            self._seen = identity
            return
        self._seen = identity
        self._take(read)

    def _take(self, read: _Fields) -> None:
        before, after = _flat(self._fields), _flat(read)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                log.info("spec.%s is now %s (before: %s)", name, after.get(name), before.get(name))
        policy = self._fields.restart_policy
        if read.restart_policy == policy:
            read = read.model_copy(update={"restart_policy": policy})
        self._fields = read


def _flat(fields: _Fields) -> dict[str, Any]:
    """Return the values by the dotted paths of the manifest."""
    found: dict[str, Any] = {}

    def add(prefix: str, node: dict[str, Any]) -> None:
        for name, value in node.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}.", value)
            else:
                found[prefix + name] = value

    add("", fields.wire())
    return found
