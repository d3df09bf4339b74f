"""What README and guide say of published models is what was measured."""

import json
import re

from grpo_devcluster.paths import REPO

RESULTS = REPO / "benchmarks" / "results"
FIGURES = json.loads((RESULTS / "own_models.json").read_text())["figures"]


def _quoted(page: str, pattern: str) -> tuple[str, ...]:
    found = re.search(pattern, " ".join((REPO / page).read_text().split()))
    assert found, f"{page} no longer says {pattern!r}"
    return found.groups()


def test_the_readme_says_how_many_published_models_were_trained() -> None:
    pattern = r"(\d+) of (\d+) such jobs .* SGLang served (\d+) of the exports"
    ok, of, served = map(int, _quoted("README.md", pattern))
    assert (ok, of) == (FIGURES["published_models_ok"], FIGURES["published_models_of"])
    assert served == FIGURES["published_models_served_by_sglang"]
    jobs = json.loads((RESULTS / "own_models_jobs.json").read_text())
    assert (sum(job["result"] == "ok" for job in jobs.values()), len(jobs)) == (ok, of)


def test_the_guide_says_when_an_error_is_named() -> None:
    (seconds,) = _quoted("docs/guide.md", r"within (\d+) s of the pod's start")
    assert FIGURES["seconds_to_named_error_max"] <= int(seconds)
