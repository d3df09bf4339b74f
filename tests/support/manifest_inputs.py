"""Inputs that the user brings, read from the comment at the top of a manifest.

Objects are named by kind: ``the PersistentVolumeClaims models and datasets``, ``the Secret hub``. A page in
parentheses behind them has the command that creates them. Files are those that the comment's commands write,
and those of data sets of the hub: ``the data set ORG/NAME with the files A and B``.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grpo_devcluster.paths import REPO

_KINDS = (
    "PersistentVolumeClaim", "Secret", "ConfigMap", "RolloutPool", "GRPOJob", "RuntimeClass", "PriorityClass",
    "ServiceAccount", "LocalQueue", "NetworkAttachmentDefinition", "resource", "label",
)  # fmt: skip
_NAME = r"[A-Za-z0-9](?:[\w./-]*\w)?"
_PATH = rf"/{_NAME}"
_NAMES = rf"({_NAME}(?:(?:, {_NAME})* and {_NAME})?)"
_OBJECTS = re.compile(rf"\bthe ({'|'.join(_KINDS)})s? {_NAMES}(?: \((docs/[\w./-]+\.md)\))?")
_IMAGE = re.compile(r"\bthe image ([\w./@:-]*\w)")
_DIRECTORY = re.compile(rf"\bdirectory ({_PATH})")
_CLAIM = re.compile(rf"\bclaim ({_NAME}) at ({_PATH})")
_DATA_SET = re.compile(rf"\bdata set ({_NAME}) with the files? {_NAMES}")
_COMMAND = re.compile(r"^ {3,}(?:hf|python3) ")


@dataclass(slots=True)
class Inputs:
    """Inputs of a manifest.

    ``objects``: (kind, name). ``claims``: directory where the commands' pod mounts each claim. ``models`` and
    ``files``: directories and files that the commands write. ``data_sets``: files of each data set of the
    hub. ``problems``: what is wrong with the comment itself.
    """

    objects: set[tuple[str, str]] = field(default_factory=set)
    claims: dict[str, str] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    data_sets: dict[str, set[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_inputs(manifest: str) -> Inputs:
    """Read the comment at the top of a manifest."""
    lines = list(_comment(manifest))
    text = " ".join(line.strip() for line in lines if not _COMMAND.match(line))
    inputs = Inputs(claims=dict(_CLAIM.findall(text)))
    for kind, names, page in _OBJECTS.findall(text):
        inputs.objects |= {(kind, name) for name in _split(names)}
        if page:
            missing = [name for name in _split(names) if not _creates(page, name)]
            inputs.problems += [f"{page} does not create {kind} {name}" for name in missing]
    inputs.objects |= {("directory", path) for path in _DIRECTORY.findall(text)}
    inputs.objects |= {("image", name) for name in _IMAGE.findall(text)}
    inputs.data_sets = {name: set(_split(files)) for name, files in _DATA_SET.findall(text)}
    for line in lines:
        if _COMMAND.match(line):
            _run(line.strip(), inputs)
    return inputs


def _comment(manifest: str) -> Iterator[str]:
    for line in manifest.splitlines():
        if not line.startswith("#"):
            return
        yield line[1:]


def _split(names: str) -> list[str]:
    return re.split(", | and ", names)


def _creates(page: str, name: str) -> bool:
    """Return whether a page of the documentation has a command that creates an object of this name."""
    file = REPO / page
    lines = file.read_text().splitlines() if file.is_file() else []
    return any(re.match(rf"(    )?kubectl create .*\b{re.escape(name)}\b", line) for line in lines)


def _run(command: str, inputs: Inputs) -> None:
    """Note what a command writes.

    ``hf download`` writes a model into a directory of its name, or the named files of a data set. Others
    write their last argument, or the files that a comment names into it, and read the paths before it.
    """
    text, _, names = command.partition("  # ")
    words = shlex.split(text)
    if words[0] == "hf":
        folder = words[words.index("--local-dir") + 1]
        source, *files = words[2 : next(i for i, word in enumerate(words) if word.startswith("--"))]
        inputs.files |= {f"{folder}/{file}" for file in files}
        if not files:
            inputs.models.add(folder)
            if Path(folder).name != source.partition("/")[2]:
                inputs.problems.append(f"{source} is downloaded into {folder}, which has another name")
        return
    *read, written = [word for word in words if word.startswith("/")]
    inputs.files |= {f"{written}/{name}" for name in names.split(", ")} if names else {written}
    inputs.problems += [f"no command writes {path}" for path in read if path not in inputs.files]
