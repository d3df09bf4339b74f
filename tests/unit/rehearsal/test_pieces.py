"""Progress of stand-in calls in pieces, and waves of a transfer."""

import pytest

from grpo_rehearsal.standins.pieces import Pieces, even, in_proportion
from grpo_rehearsal.standins.waves import Waves


def test_equal_pieces_count_one_each_and_at_least_one() -> None:
    pieces = even(10.0, 4.9)
    assert pieces == Pieces((2.5, 5.0, 7.5, 10.0), (1, 2, 3, 4))
    assert pieces.longest == 2.5 and pieces.seconds == 10.0 and pieces.count == 4
    assert even(3.0, 0.5) == even(3.0) == Pieces((3.0,), (1,))


def test_a_larger_piece_takes_longer_and_counts_more_when_it_is_done() -> None:
    pieces = in_proportion([10, 70, 20], 5.0)
    assert pieces.ends == pytest.approx((0.5, 4.0, 5.0)) and pieces.longest == pytest.approx(3.5)
    assert [pieces.done(elapsed) for elapsed in (-1.0, 0.4, 0.6, 3.9, 4.1, 9.0)] == [0, 0, 10, 10, 80, 100]
    assert in_proportion([], 5.0) == in_proportion([0], 5.0) == even(5.0)


def test_a_wait_before_the_pieces_is_a_piece() -> None:
    pieces = in_proportion([6, 4], 1.0).after(30.0)
    assert pieces.ends == pytest.approx((30.0, 30.6, 31.0)) and pieces.counts == (1, 7, 11)
    assert pieces.longest == 30.0


def test_what_is_left_of_pieces_begins_in_the_middle_of_one() -> None:
    left = in_proportion([10, 70, 20], 5.0).since(1.0)
    assert left.ends == pytest.approx((3.0, 4.0)) and left.counts == (70, 90)
    assert in_proportion([10, 70, 20], 5.0).since(6.0) == even(0.0)
    later = in_proportion([6, 4], 1.0).since(-2.0)
    assert later.ends == pytest.approx((2.6, 3.0)) and later.counts == (6, 10)


def test_a_wave_waits_for_those_before_it_in_the_buffers() -> None:
    waves = Waves((1.0, 2.0, 5.0, 6.0, 7.0))
    assert waves.longest_wait == 5.0, "waves 1 to 3 and 2 to 4 arrive in five seconds, 3 to 5 too"
    assert waves.pieces == Pieces((1.0, 2.0, 7.0), (4, 5, 6)), "three are sent at once, the others one by one"
    assert Waves((4.0,)).longest_wait == 4.0 and Waves((4.0,)).pieces == Pieces((4.0,), (2,))
