"""Volumes with the files of a model or a data set, and the directories where pods mount them."""

from typing import Annotated

from pydantic import Field

from grpo_operator.api.base import Model, Name, Path, ShortString
from grpo_operator.api.rules import Rule

# Names below a volume's directory in the job's store. The fetch writes the marker last: pods wait for it.
COMPLETE, FETCHED_FILES = "COMPLETE", "files"
# Directories that images need or where pods mount something else.
RESERVED = (
    "/store", "/weights", "/etc", "/tmp", "/dev", "/proc", "/sys", "/usr", "/bin", "/sbin", "/lib", "/lib64",
    "/opt", "/root", "/home", "/var", "/run", "/sgl-workspace",
)  # fmt: skip


def within(path: str, directory: str) -> bool:
    """Return whether ``path`` is the directory or lies below it."""
    return path == directory or path.startswith(directory + "/")


class CredentialSpec(Model):
    """A key of a Secret in the job's namespace."""

    secret: Name = Field(description="metadata.name of the Secret")
    key: ShortString = Field("token", description="key of the Secret's data that holds the credential")


MountPath = Annotated[str, Field(min_length=2, max_length=253, pattern=r"^(/[A-Za-z0-9._-]+)+$")]

_RESERVED_LIST = ", ".join(f"'{path}'" for path in RESERVED)
_VOLUME_RULES: tuple[Rule["VolumeSpec"], ...] = (
    Rule(
        "[has(self.pvc), has(self.path), has(self.uri)].filter(given, given).size() == 1",
        "set exactly one of pvc, path and uri",
        lambda volume: [volume.pvc, volume.path, volume.uri].count(None) == 2,
    ),
    Rule(
        "has(self.uri) || !(has(self.endpoint) || has(self.digest) || has(self.credential))",
        "endpoint, digest and credential need uri: remove them, or set uri",
        lambda volume: volume.uri is not None or not (volume.endpoint or volume.digest or volume.credential),
    ),
    Rule(
        "!has(self.endpoint) || !has(self.uri) || self.uri.startsWith('hf://')",
        "endpoint is the address of a Hugging Face mirror: remove it, or set a uri that begins with hf://",
        lambda volume: not volume.endpoint or not volume.uri or volume.uri.startswith("hf://"),
    ),
    Rule(
        f"![{_RESERVED_LIST}]"
        ".exists(taken, self.mountPath == taken || self.mountPath.startsWith(taken + '/'))",
        f"mountPath must not lie in {', '.join(RESERVED)}: choose another, such as /models",
        lambda volume: not any(within(volume.mount_path, taken) for taken in RESERVED),
    ),
)


class VolumeSpec(Model):
    """A read-only directory, mounted into every pod that reads it. Exactly one of pvc, path and uri."""

    rules = _VOLUME_RULES
    mount_path: MountPath = Field(description="absolute directory inside the pods, such as /models")
    pvc: Name | None = Field(
        None, description="name of a PersistentVolumeClaim that pods on several nodes can mount"
    )
    path: Path | None = Field(None, pattern=r"^/.+$", description="absolute directory on every node")
    uri: str | None = Field(
        None,
        max_length=1024,
        pattern=r"^(hf|https?|s3|gs|az|abfs)://.+$",
        description="source that is downloaded once into the job's store: hf://ORG/NAME[@REVISION], "
        "hf://datasets/ORG/NAME[@REVISION], or the fsspec URL of a file or directory",
    )
    endpoint: str | None = Field(
        None,
        max_length=253,
        pattern=r"^https?://.+$",
        description="address of a Hugging Face mirror for hf:// sources; default: the public hub",
    )
    digest: str | None = Field(
        None,
        max_length=71,
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="expected digest of the files: the sha256 of the lines that sha256sum prints for all "
        "files, sorted by path; paths are relative to the directory, without a leading ./",
    )
    credential: CredentialSpec | None = Field(
        None,
        description="Secret with the hub's token or a web server's bearer token; use it with https only",
    )
