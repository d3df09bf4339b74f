"""The devcluster's pure parts: keys, daemons by pid file, versions in flags, reports."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster import gobuild, processes
from grpo_devcluster.paths import content_key, tree_key
from grpo_devcluster.report import GAP, REWARD, summarise, terminal_curve
from grpo_devcluster.stages import StageError, run, wait_for


def test_cache_keys_depend_on_content_and_its_boundaries(tmp_path: Path) -> None:
    assert content_key(b"ab", b"c") != content_key(b"a", b"bc")
    (tmp_path / "x").write_text("1")
    before = tree_key(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_text("2")
    assert tree_key(tmp_path) == before
    (tmp_path / "x").write_text("3")
    assert tree_key(tmp_path) != before


def test_only_kubernetes_binaries_carry_its_version() -> None:
    apiserver = " ".join(gobuild._flags(gobuild.COMPONENTS["kube-apiserver"]))
    assert "gitVersion=v1.35.4" in apiserver and "gitMinor=35" in apiserver
    assert "gitVersion" not in " ".join(gobuild._flags(gobuild.COMPONENTS["etcd"]))


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PIDS", tmp_path / "pids")
    monkeypatch.setattr(processes, "LOGS", tmp_path / "logs")


def test_a_daemon_is_found_again_and_stopped(daemons: None) -> None:
    processes.start("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert processes.is_running("sleeper") and processes.names() == ["sleeper"]
    processes.stop("sleeper")
    assert not processes.is_running("sleeper") and processes.names() == []


def test_another_process_with_the_same_number_is_not_taken_for_the_daemon(daemons: None) -> None:
    """After an unclean exit a pid file may name another process, which must not be killed."""
    processes.PIDS.mkdir()
    (processes.PIDS / "old").write_text("1 12345")  # init, but with another start time
    assert not processes.is_running("old")
    processes.stop("old")
    assert Path("/proc/1").exists()


def test_a_failing_step_names_cause_and_remedy(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("grpo_devcluster.stages.LOGS", tmp_path)
    with pytest.raises(StageError, match=r"building x failed \(exit 3\):\nno luck\nTry again\."):
        run(["sh", "-c", "echo no luck; exit 3"], step="building x", remedy="Try again.")
    with pytest.raises(StageError, match=r"no-such-tool is not installed\. Install it\."):
        run(["no-such-tool"], step="x", remedy="Install it.")


def test_a_timeout_shows_the_log_of_the_process(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("address already in use\n")
    started = time.monotonic()
    with pytest.raises(StageError, match=r"x is not ready after 0 s\.\naddress already in use"):
        wait_for("x", lambda: False, 0.1, log)
    assert time.monotonic() - started < 5


def _records(rewards: list[float]) -> list[dict[str, Any]]:
    base = {GAP: 1e-7, "timing_s/step": 2.0, "timing_s/update_weights": 0.5}
    return [{"step": i + 1, REWARD: r} | base for i, r in enumerate(rewards)]


def test_the_statistic_tells_a_rise_from_noise() -> None:
    rising, flat = [i / 40 for i in range(40)], [0.1, 0.2] * 20
    assert summarise(_records(rising))["p_value"] < 1e-4
    assert summarise(_records(flat))["p_value"] > 0.3
    assert summarise(_records(rising))["reward_last_quarter"] > 0.8
    assert terminal_curve([0.0, 0.5, 1.0]) == " ▄█"
