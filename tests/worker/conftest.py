"""Fixtures that several modules share, because their start takes most of a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.disturbed_job import Run, run_with
from support.engine_server import Server
from support.late_engine import UNPADDED, publish_model

# Modules whose cases are layouts or kinds of one mechanism: ``make test`` runs the first case of each test,
# and ``make slow`` the others.
SAMPLED = frozenset(
    f"test_{name}"
    for name in (
        "activation_offload",
        "agent_memory",
        "context_parallel",
        "direct_transfer",
        "double_buffer",
        "engine_loads",
        "expert_overlap",
        "gradient_check",
        "loading",
        "log_prob_sizes",
        "megatron_versions",
        "mtp",
        "oracles",
        "overlap",
        "planner",
        "precision_aware",
        "recompute",
        "replay",
        "router",
        "store_fill",
        "sync_layouts",
        "token_dispatcher",
        "wave_transfer",
        "weight_stress",
    )
)

# Layouts of tests/worker/test_fidelity.py that ``make test`` runs: each family, and each axis beside another.
WIDEST = frozenset(
    {
        *("deepseek-pp2-vpp2-uneven", "deepseek-tp2-pp2-ep2", "deepseek-tp2-cp2-ep4", "qwen3-tp2-pp2"),
        *("qwen3-tied-pp2", "qwen3-moe-tp2-ep2", "qwen3-moe-cp2-pp2", "llama-tp2-pp2", "qwen2-cp2"),
        *("glm-tp2-ep2", "kimi-tp2-ep2"),
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the narrower layouts, and all cases but the first of each test in sampled modules."""
    seen: set[tuple[str, str]] = set()
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        test = item.path.stem, item.originalname
        if item.path.stem == "test_fidelity":
            narrow = item.callspec.params.get("name", "") not in {"", *WIDEST}
        else:
            narrow = item.path.stem in SAMPLED and test in seen
        if narrow:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("engine"))
    yield running
    running.kill()


@pytest.fixture(scope="module")
def two_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which trainer ranks have published versions 1 and 2 of a small model."""
    root = tmp_path_factory.mktemp("weights")
    for version in (1, 2):
        publish_model(root, version, UNPADDED)
    return root


@pytest.fixture(scope="session")
def undisturbed_job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the job of the tests that inject faults into ranks, without any fault."""
    run = run_with(tmp_path_factory.mktemp("undisturbed"), [])
    assert not run.ends and not run.recoveries
    return run
