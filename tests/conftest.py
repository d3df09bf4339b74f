"""Records which tests of faults have passed, with GRPO_RECORD_PASSES=1 in the environment.

benchmarks/results/faults.json has the commit, date and machine of each; docs/reference/faults.md shows them.
"""

import os
from collections import defaultdict

import pytest

from grpo_devcluster.results import record_cases


class _Passes:
    """Tests of faults that have passed with all the cases that ran."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "fault" not in report.keywords:
            return
        test = report.nodeid.partition("[")[0]
        if report.failed:
            self._failed.add(test)
        elif report.when == "call" and report.passed:
            self._seconds[test] += report.duration

    def pytest_sessionfinish(self) -> None:
        passed = {
            test: {"seconds": round(seconds, 1)}
            for test, seconds in self._seconds.items()
            if test not in self._failed
        }
        if passed:
            record_cases("faults", passed)


def pytest_configure(config: pytest.Config) -> None:
    of_xdist = hasattr(config, "workerinput")  # the process that started it gets the reports too
    if os.environ.get("GRPO_RECORD_PASSES") == "1" and not of_xdist:
        config.pluginmanager.register(_Passes())
