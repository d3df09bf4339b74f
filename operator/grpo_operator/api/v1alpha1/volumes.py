"""Sources of the files of a model or a data set, and the directories where pods see them."""

from typing import Annotated

from pydantic import Field, model_validator

from grpo_operator.api.base import Model, Name, Path, ShortString

# Below a volume's directory in the job's store. The fetch writes the marker last; pods wait for it.
COMPLETE, FETCHED_FILES = "COMPLETE", "files"
# What pods mount or need there already.
RESERVED = (
    "/store", "/weights", "/etc", "/tmp", "/dev", "/proc", "/sys", "/usr", "/bin", "/sbin", "/lib", "/lib64",
    "/opt", "/root", "/home", "/var", "/run", "/sgl-workspace",
)  # fmt: skip
_ONE = "set exactly one of pvc, path and uri"
_FETCHED = "endpoint, digest and credential belong to uri: remove them, or set uri"
_RESERVED = f"mountPath must not lie in {', '.join(RESERVED)}: choose another, such as /models"
_ENDPOINT = "endpoint is the address of a hub mirror: it needs a uri that begins with hf://"


class CredentialSpec(Model):
    """A key of a Secret in the job's namespace."""

    secret: Name = Field(description="metadata.name of the Secret")
    key: ShortString = Field("token", description="key of its data that holds the credential")


MountPath = Annotated[str, Field(min_length=2, max_length=253, pattern=r"^(/[A-Za-z0-9._-]+)+$")]


class VolumeSpec(Model):
    """A read-only directory in every pod that reads it. Exactly one of pvc, path and uri."""

    cel = (
        ("[has(self.pvc), has(self.path), has(self.uri)].filter(given, given).size() == 1", _ONE),
        ("has(self.uri) || !(has(self.endpoint) || has(self.digest) || has(self.credential))", _FETCHED),
        ("!has(self.endpoint) || !has(self.uri) || self.uri.startsWith('hf://')", _ENDPOINT),
        (
            "!["
            + ", ".join(f"'{path}'" for path in RESERVED)
            + "].exists(taken, self.mountPath == taken || self.mountPath.startsWith(taken + '/'))",
            _RESERVED,
        ),
    )
    mount_path: MountPath = Field(description="absolute directory where pods see it, such as /models")
    pvc: Name | None = Field(None, description="name of a PersistentVolumeClaim that many nodes may read")
    path: Path | None = Field(None, pattern=r"^/.+$", description="absolute directory on every node")
    uri: str | None = Field(
        None,
        max_length=1024,
        pattern=r"^(hf|https?|s3|gs|az|abfs)://.+$",
        description="fetched once into the job's store: hf://ORG/NAME[@REVISION], "
        "hf://datasets/ORG/NAME[@REVISION], or a file or directory as fsspec names it",
    )
    endpoint: str | None = Field(
        None, max_length=253, pattern=r"^https?://.+$", description="hub mirror for hf://; default: the hub"
    )
    digest: str | None = Field(
        None,
        max_length=71,
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="sha256 of the lines that sha256sum prints for all files, sorted by path; paths are "
        "relative to the directory, without a leading ./",
    )
    credential: CredentialSpec | None = Field(
        None, description="token of the hub, or bearer token of a web server; send it over https"
    )

    @model_validator(mode="after")
    def _check(self) -> "VolumeSpec":
        if sum(value is not None for value in (self.pvc, self.path, self.uri)) != 1:
            raise ValueError(_ONE)
        if self.uri is None and (self.endpoint or self.digest or self.credential):
            raise ValueError(_FETCHED)
        if self.endpoint and self.uri and not self.uri.startswith("hf://"):
            raise ValueError(_ENDPOINT)
        if any(within(self.mount_path, taken) for taken in RESERVED):
            raise ValueError(f"mountPath={self.mount_path}: {_RESERVED}")
        return self


def within(path: str, directory: str) -> bool:
    """Is ``path`` the directory or below it?"""
    return path == directory or path.startswith(directory + "/")
