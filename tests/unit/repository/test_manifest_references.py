"""Every reference of every manifest is resolved, and a typo in one is found."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.results import record_from_test
from support.manifest_inputs import read_inputs
from support.manifest_references import objects, unresolved
from support.manifests import MANIFESTS, documents, file_of, name_of, named_files

Place = tuple[str | int, ...]  # keys that lead to a value

# Of a controller with the functions of a ConfigMap.
CODE = {
    "volumes": [{"name": "code", "configMap": {"name": "rewards"}}],
    "containers": [{"name": "controller", "volumeMounts": [{"name": "code", "mountPath": "/code"}]}],
}
# Directories in pods and on nodes: what lies in them is checked.
PLACES = ("mountPath", "path")


def _texts(node: Any, at: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield each text of a document and its place."""
    if isinstance(node, str):
        yield at, node
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield from _texts(value, (*at, key))


def _head(text: str) -> str:
    """Return the comment at the top of a manifest."""
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))


def _with_typo(made: list[dict[str, Any]], number: int, place: Place, name: str) -> str:
    """Return the documents as text; in one of them, the last character of a name is missing."""
    damaged = copy.deepcopy(made)
    target: Any = damaged[number]
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = target[place[-1]].replace(name, name[:-1], 1)
    return yaml.safe_dump_all(damaged)


def _references(text: str) -> Iterator[tuple[int, Place, str]]:
    """Yield document, place and name of each text that refers to something, or that something refers to."""
    made = documents(text)
    used = {reference for document in made for reference in objects(document)}
    names = {name for _, name in used}
    names |= {value.partition("?")[0] for each in made for _, value, _ in named_files(each)}
    for number, document in enumerate(made):
        for place, value in _texts(document):
            name = value.partition("?")[0]
            if place == ("metadata", "name"):
                named = (document["kind"], name) in used
            else:
                named = name in names and "variables" not in place  # of a policy's own expressions
            if named:
                yield number, place, name


def _found(text: str) -> bool:
    """Return whether a manifest is refused, or something of it is not resolved."""
    try:
        return bool(unresolved(text))
    except ValueError:  # of the API's models, such as a path outside of its volume
        return True


def test_every_reference_is_resolved() -> None:
    problems = {name_of(file): unresolved(file.read_text()) for file in MANIFESTS}
    resolved = sum(not found for found in problems.values())
    record_from_test("experience", {"manifests_resolved": resolved, "manifests": len(problems)})
    assert len(problems) > 20 and {name: found for name, found in problems.items() if found} == {}


@pytest.mark.parametrize("file", MANIFESTS, ids=name_of)
def test_a_typo_in_a_reference_is_found(file: Path) -> None:
    text = file.read_text()
    places = list(_references(text))
    assert places, "nothing is checked"
    for number, place, name in places:
        damaged = _head(text) + _with_typo(documents(text), number, place, name)
        assert _found(damaged), f"{'.'.join(map(str, place))}: a typo in {name} is not found"


@pytest.mark.parametrize("file", MANIFESTS, ids=name_of)
def test_what_the_comment_at_the_top_names_is_needed(file: Path) -> None:
    text = file.read_text()
    inputs = read_inputs(text)
    bare = unresolved(yaml.safe_dump_all(documents(text)))
    for kind, name in inputs.objects:
        assert f"{kind} {name}: nothing provides it" in bare
    assert len(bare) >= len(inputs.objects) + bool(inputs.models) + bool(inputs.files)


@pytest.mark.parametrize("file", [f for f in MANIFESTS if f.parent.name != "policies"], ids=name_of)
def test_no_path_is_overlooked(file: Path) -> None:
    for document in documents(file.read_text()):
        checked = {file_of(value) for _, value, _ in named_files(document)}
        paths = {(place[-1], file_of(value)) for place, value in _texts(document) if file_of(value)}
        assert {path for key, path in paths if key not in PLACES} <= checked


def test_every_kind_of_reference_is_seen() -> None:
    (file,) = (file for file in MANIFESTS if file.stem == "qwen3-8b-8gpu")
    (job,) = documents(file.read_text())
    job["spec"] |= {
        "image": "registry.example.com/own:1",
        "checkpoint": {"store": {"uri": "s3://bucket/jobs", "secret": "s3"}},
        "rollout": {"poolRef": {"name": "shared"}},
        "mode": "static",
        "weightSync": {},
        "validation": {"sets": [{"name": "aime", "data": "/data/aime.parquet"}]},
        "reward": {"function": "/code/reward.py:score"},
        "scheduling": {
            "queueName": "team", "priorityClassName": "research", "runtimeClassName": "nvidia",
            "imagePullSecrets": ["registry"], "topologyKey": "example.com/leaf",
            "rdma": {"devices": [{"resource": "rdma/hca"}], "networks": ["fabric/rail0"]},
        },
    }  # fmt: skip
    job["spec"]["controller"] = {"podTemplate": {"spec": CODE}}
    found = unresolved(_head(file.read_text()) + yaml.safe_dump(job))
    missing = {each.removesuffix(": nothing provides it") for each in found}
    assert missing >= {
        "image registry.example.com/own:1", "Secret s3", "Secret registry", "RolloutPool shared",
        "LocalQueue team", "PriorityClass research", "RuntimeClass nvidia", "label example.com/leaf",
        "resource rdma/hca", "NetworkAttachmentDefinition fabric/rail0", "ConfigMap rewards",
        "reward.function=/code/reward.py:score: the ConfigMap has no such file",
        "validation.sets aime=/data/aime.parquet: no command at the top writes /data/aime.parquet",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("(docs/guides/volumes.md)", "(docs/guides/tls.md)", "docs/guides/tls.md does not create Secret hub"),
        ("data set openai/gsm8k", "data set openai/gsm8", "the top names no such file of openai/gsm8k"),
    ],
)
def test_a_wrong_word_in_the_comment_at_the_top_is_found(right: str, wrong: str, problem: str) -> None:
    (file,) = (file for file in MANIFESTS if file.stem == "llama-3.1-8b-colocated-8gpu")
    assert any(problem in found for found in unresolved(file.read_text().replace(right, wrong)))
