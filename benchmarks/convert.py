"""Convert the examples of verl, slime and NeMo-RL with ``grpo-convert``.

    convert.py FOLDER [--kubeconfig FILE]

FOLDER has clones of their repositories, by the names in SOURCES. Writes what became of each example to
benchmarks/results/convert.json, with the commit of its repository, and the counts of verl's examples to
benchmarks/results/experience.json. No example is copied. With a kubeconfig, its API server, which must have
the CRDs, is asked whether it accepts each manifest; nothing is created.
"""

import argparse
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_devcluster.results import RESULTS, record, record_cases
from grpo_operator.api import manifest_yaml
from grpo_operator.cli.convert import texts_of
from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import convert
from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.source import Framework


@dataclass(frozen=True)
class Source:
    """A repository with examples. ``counted``: its examples are among those of the figures."""

    clone: str
    repository: str
    framework: Framework
    patterns: tuple[str, ...]
    counted: bool = False


SOURCES = (
    Source(
        "verl",
        "volcengine/verl",
        Framework.VERL,
        ("examples/*_trainer/*.sh", "examples/tuning/*/*.sh"),
        counted=True,
    ),
    Source(
        "verl-recipe", "verl-project/verl-recipe", Framework.VERL, ("dapo/*run_*.sh", "dapo/test_*.sh"), True
    ),
    Source("slime", "THUDM/slime", Framework.SLIME, ("scripts/*.sh", "scripts/low_precision/*.sh")),
    Source("RL", "NVIDIA-NeMo/RL", Framework.NEMO_RL, ("examples/configs/*.yaml",)),
)


def main() -> None:
    """Convert every example and record the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kubeconfig", type=Path)
    options = parser.parse_args()
    server = Cluster((f"--kubeconfig={options.kubeconfig}",)) if options.kubeconfig else None
    found = {
        source: _cases(options.folder / source.clone, source, server)
        for source in SOURCES
        if (options.folder / source.clone).is_dir()
    }
    (RESULTS / "convert.json").unlink(missing_ok=True)  # examples that no longer exist
    record_cases("convert", {name: case for cases in found.values() for name, case in cases.items()})
    for source, cases in found.items():
        print(source.repository, dict(Counter(case["result"] for case in cases.values())))
    counted = [case for source, cases in found.items() if source.counted for case in cases.values()]
    converted = [case for case in counted if case["result"] == "converted"]
    figures = {"verl_examples": len(counted), "verl_examples_converted": len(converted)}
    if server is not None:
        accepted = sum(case["dry_run"] == "accepted" for case in converted)
        figures["verl_examples_dry_run_ok"] = accepted
    record("experience", figures)


def _cases(clone: Path, source: Source, server: Cluster | None) -> dict[str, Any]:
    git = ["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    origin = {"repository": source.repository, "repository_commit": commit}
    files = sorted({file for pattern in source.patterns for file in clone.glob(pattern)})
    return {
        f"{source.clone}/{file.relative_to(clone)}": origin | _result(file, source, server) for file in files
    }


def _result(file: Path, source: Source, server: Cluster | None) -> dict[str, Any]:
    """Convert one example without options of the command, and ask the API server."""
    try:
        done = convert(source.framework, texts_of(file), Choices(), {})
    except ConvertError as error:
        return {"result": "refused", "reasons": str(error).splitlines()}
    lines = {"taken": done.taken, "chosen": done.chosen, "missing": done.missing}
    asked = {"dry_run": _dry_run(server, done.manifest)} if server is not None else {}
    return {"result": "converted"} | {name: len(each) for name, each in lines.items()} | asked


def _dry_run(server: Cluster, manifest: dict[str, Any]) -> str:
    """Return whether the API server would accept a manifest, else why not."""
    text = manifest_yaml.dump(manifest)
    try:
        server.text("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    except KubectlError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    main()
