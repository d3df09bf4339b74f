"""Arithmetic of the report."""

import pytest

from grpo_rehearsal.report.intervals import covered, idle_share, integral, sampled, total_of


def test_expert_overlapping_intervals_count_once_and_only_inside_the_window() -> None:
    assert covered([(0, 4), (2, 6), (8, 20)], (1, 10)) == 5 + 2
    assert idle_share([(0, 4), (2, 6), (8, 20)], (1, 10)) == pytest.approx(2 / 9)
    assert idle_share([], (3, 3)) == 0


def test_step_functions_add_up() -> None:
    assert total_of([[(0, 1), (5, 3)], [(2, 10), (5, 0)]]) == [(0, 1), (2, 11), (5, 3)]


def test_integrals_begin_with_the_first_step_and_end_with_the_window() -> None:
    steps = [(2, 10), (4, 1)]
    assert integral(steps, (0, 6)) == 20 + 2
    assert integral(steps, (3, 5)) == 10 + 1


def test_samples_hold_the_last_value() -> None:
    assert sampled([(2, 10), (4, 1)], (0, 6), 4) == [(0, 0), (2, 10), (4, 1), (6, 1)]
    assert sampled([], (0, 6), 2) == [(0, 0), (6, 0)]
