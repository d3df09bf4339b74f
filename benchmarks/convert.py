"""Convert the examples of verl, slime and NeMo-RL with ``kubectl grpo convert``.

    convert.py FOLDER

FOLDER has clones of their repositories, by the names in SOURCES. Writes what became of each example to
benchmarks/results/convert.json, with the commit of its repository, and the counts of verl's examples to
benchmarks/results/experience.json. No example is copied.
"""

import argparse
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_devcluster.results import RESULTS, record, record_cases
from grpo_operator.cli.kubectl.conversion import texts_of
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
    folder = parser.parse_args().folder
    found = {
        source: _cases(folder / source.clone, source)
        for source in SOURCES
        if (folder / source.clone).is_dir()
    }
    (RESULTS / "convert.json").unlink(missing_ok=True)  # examples that no longer exist
    record_cases("convert", {name: case for cases in found.values() for name, case in cases.items()})
    for source, cases in found.items():
        print(source.repository, dict(Counter(case["result"] for case in cases.values())))
    counted = [case for source, cases in found.items() if source.counted for case in cases.values()]
    converted = sum(case["result"] == "converted" for case in counted)
    record("experience", {"verl_examples": len(counted), "verl_examples_converted": converted})


def _cases(clone: Path, source: Source) -> dict[str, Any]:
    git = ["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    origin = {"repository": source.repository, "repository_commit": commit}
    files = sorted({file for pattern in source.patterns for file in clone.glob(pattern)})
    return {f"{source.clone}/{file.relative_to(clone)}": origin | _result(file, source) for file in files}


def _result(file: Path, source: Source) -> dict[str, Any]:
    """Convert one example without options of the command."""
    try:
        done = convert(source.framework, texts_of(file), Choices(), {})
    except ConvertError as error:
        return {"result": "refused", "reasons": str(error).splitlines()}
    lines = {"taken": done.taken, "chosen": done.chosen, "missing": done.missing}
    return {"result": "converted"} | {name: len(each) for name, each in lines.items()}


if __name__ == "__main__":
    main()
