"""Security contexts of pods, as the Pod Security Standard ``restricted`` demands, and their /tmp (pure).

A container whose feature needs more says so in its own securityContext before it is hardened.
"""

from dataclasses import dataclass
from typing import Any

from grpo_operator.api.v1alpha1.pod_security import SecurityContextSpec

USER = 65532  # as of the operator's own image; no image needs to know it
HOME = "/tmp"  # caches of libraries are below the home directory
_NAME = "grpo"  # torch and Ray ask for a name of the user, who is in no image's /etc/passwd


@dataclass(frozen=True, slots=True)
class PodSecurity:
    """User of an owner's pods.

    ``needs_root``: they use a feature that works for root only, unless the nodes are prepared.
    """

    spec: SecurityContextSpec = SecurityContextSpec()
    needs_root: bool = False

    @property
    def user(self) -> int:
        """Return the uid of the processes."""
        default = 0 if self.needs_root else USER
        return default if self.spec.run_as_user is None else self.spec.run_as_user

    @property
    def group(self) -> int:
        """Return the gid of the processes."""
        return self.user if self.spec.run_as_group is None else self.spec.run_as_group

    def hardened(self, template: dict[str, Any]) -> dict[str, Any]:
        """Return a complete pod template with security contexts, and with a /tmp for each container."""
        spec = dict(template["spec"])
        volumes = list(spec.get("volumes", []))
        for kind in ("initContainers", "containers"):
            if kind in spec:
                spec[kind] = [self._hardened_container(container) for container in spec[kind]]
                volumes += [{"name": _scratch(container), "emptyDir": {}} for container in spec[kind]]
        return template | {"spec": spec | {"securityContext": self._pod_context(), "volumes": volumes}}

    def _pod_context(self) -> dict[str, Any]:
        context: dict[str, Any] = {
            "runAsNonRoot": self.user != 0,
            "runAsUser": self.user,
            "runAsGroup": self.group,
            "fsGroup": self.group if self.spec.fs_group is None else self.spec.fs_group,
            # Else kubelet would visit every file of the store before each start of a pod.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        if self.spec.supplemental_groups:
            context["supplementalGroups"] = list(self.spec.supplemental_groups)
        return context

    def _hardened_container(self, container: dict[str, Any]) -> dict[str, Any]:
        given = container.get("securityContext", {})
        context = given | {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]} | given.get("capabilities", {}),
            "readOnlyRootFilesystem": self.spec.read_only_root_filesystem,
        }
        have = {variable["name"] for variable in container["env"]}
        own = {"HOME": HOME, "USER": _NAME}
        variables = [{"name": name, "value": value} for name, value in own.items() if name not in have]
        mounts = list(container["volumeMounts"])
        if all(mount["mountPath"] != "/tmp" for mount in mounts):
            mounts.insert(0, {"name": _scratch(container), "mountPath": "/tmp"})
        return container | {
            "securityContext": context,
            "env": [*variables, *container["env"]],
            "volumeMounts": mounts,
        }


def _scratch(container: dict[str, Any]) -> str:
    return f"tmp-{container['name']}"
