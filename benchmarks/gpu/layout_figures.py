"""Figures of layouts.py (pure)."""

from collections.abc import Mapping
from typing import Any

_FP8 = " fp8 "


def figures(cases: Mapping[str, Any]) -> dict[str, float]:
    """Return the worst figures over all layouts, of bf16 and of FP8 where both are measured."""
    speeds = {name: case for name, case in cases.items() if "ratio_vs_megatron" in case}
    kinds = {
        "": [case for name, case in speeds.items() if _FP8 not in name],
        "_fp8": [case for name, case in speeds.items() if _FP8 in name],
    }
    found: dict[str, float] = {}
    for kind, rows in kinds.items():
        if rows:
            found |= {
                f"layouts_ratio_vs_megatron_te_min{kind}": min(row["ratio_vs_megatron"] for row in rows),
                f"layouts_mfu_pct_min{kind}": min(row["mfu_pct"] for row in rows),
                f"layouts_mfu_pct_max{kind}": max(row["mfu_pct"] for row in rows),
            }
    if speeds:
        found |= {
            "layouts_memory_error_pct_max": max(
                abs(error) for case in speeds.values() for error in case["memory_error_pct"]
            ),
            "layouts_step_time_error_pct_max": max(
                100 * abs(case["planned_seconds"] / case["seconds"] - 1) for case in speeds.values()
            ),
        }
    for kind, suffix in (("bf16", ""), ("fp8", "_fp8")):
        rows = [case for name, case in cases.items() if name.startswith(f"fidelity {kind} ")]
        if rows:
            found |= {
                f"layouts_{of}_over_rounding_max{suffix}": max(
                    row["layout"][of] / row["rounding"][of] for row in rows
                )
                for of in ("logprob_mean", "gradient")
            }
    return found
