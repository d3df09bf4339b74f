"""``python -m grpo_devcluster.release.version [VERSION]``: print the version, or set it.

Its one place is ``grpo_operator.__version__``, from which hatchling takes the wheel's. Helm reads Chart.yaml
as it is, so that the chart's two versions are written together with it; a unit test compares them.
"""

import re
import sys
from pathlib import Path

from grpo_devcluster.paths import REPO
from grpo_devcluster.stages import StageError, fail

SOURCE = Path("operator/grpo_operator/__init__.py")
_LINES = {
    SOURCE: (r'^__version__ = "(.*)"$',),
    Path("helm/grpo-operator/Chart.yaml"): (r"^version: (.*)$", r'^appVersion: "(.*)"$'),
}
# Valid for wheels, for images' tags and, by the semantic versions that Helm asks for, for charts.
_VERSION = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}")


def current(repository: Path = REPO) -> str:
    """Return the version of a checkout."""
    return _found(repository / SOURCE, _LINES[SOURCE][0])[1]


def set_version(version: str, repository: Path = REPO) -> None:
    """Write the version into a checkout. Raises StageError for what is no version."""
    if not _VERSION.fullmatch(version):
        raise StageError(f"VERSION is {version!r}: give three numbers without zeros in front, as in 1.2.3")
    for name, patterns in _LINES.items():
        file = repository / name
        for pattern in patterns:
            text, match = file.read_text(), _found(file, pattern)
            file.write_text(text[: match.start(1)] + version + text[match.end(1) :])


def _found(file: Path, pattern: str) -> re.Match[str]:
    found = list(re.finditer(pattern, file.read_text(), re.MULTILINE))
    if len(found) != 1:
        raise StageError(f"{file} has {len(found)} lines like {pattern}: it must have one")
    return found[0]


def main() -> None:
    """Print the version, after setting it if one is given."""
    try:
        for version in sys.argv[1:2]:
            set_version(version)
        print(current())
    except StageError as error:
        fail(error)


if __name__ == "__main__":
    main()
