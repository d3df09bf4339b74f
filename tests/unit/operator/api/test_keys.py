"""Keys and epochs: who knows which key, and that no call is refused while an epoch begins."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api.keys import Epochs, owner_key, pair_key, secret_data, token

MASTER = "m" * 64


def _job(name: str = "first", uid: str = "11111111-a") -> dict[str, Any]:
    return {"kind": "GRPOJob", "metadata": {"name": name, "uid": uid}}


def _pool(uid: str = "22222222-a") -> dict[str, Any]:
    return {"kind": "RolloutPool", "metadata": {"name": "first", "uid": uid}}


def test_each_job_and_pool_has_a_key_of_its_own() -> None:
    owners = [_job(), _job(uid="11111111-b"), _job("other", "33333333"), _pool()]
    keys = {owner_key(MASTER, owner) for owner in owners}
    assert len(keys) == len(owners)
    assert owner_key("n" * 64, _job()) not in keys and MASTER not in keys
    assert owner_key(MASTER, _pool()) == owner_key(MASTER, _pool("another")), "by name"


def test_a_job_and_its_shared_pool_derive_the_same_key() -> None:
    of_job = secret_data(MASTER, _job(), "first")
    assert of_job == {
        "key": owner_key(MASTER, _job()),
        "pair": pair_key(owner_key(MASTER, _pool()), "first-11111111"),
    }
    assert secret_data(MASTER, _job("second", "44444444"), "first")["pair"] != of_job["pair"]
    assert secret_data(MASTER, _job(), None) == {"key": owner_key(MASTER, _job())}


def test_a_token_tells_neither_key_nor_epoch() -> None:
    assert len({token("key", "a"), token("key", "b"), token("other", "a"), "key", "a"}) == 5


OLD = Epochs("old", 0.0, None, 60)
NEW = OLD.next("new", 1000.0, 60)


@given(caller=st.floats(0, 60), server=st.floats(0, 60), at=st.floats(0, 300))
def test_no_call_is_refused_while_an_epoch_begins(caller: float, server: float, at: float) -> None:
    """Caller and server see the new epoch at different times within the overlap."""
    now = NEW.since + at
    sent = (NEW if at >= caller else OLD).sent(now)
    assert sent in (NEW if at >= server else OLD).accepted(now)


def test_a_pod_that_sees_a_new_epoch_too_late_refuses_calls() -> None:
    """The counterexample: the overlap is what protects calls."""
    now = NEW.since + 61
    assert NEW.sent(now) not in OLD.accepted(now)


def test_the_previous_epoch_ends_and_no_other_one_begins_before() -> None:
    assert NEW.accepted(NEW.since + 119) == ("new", "old") and not NEW.settled(NEW.since + 119)
    assert NEW.accepted(NEW.since + 120) == ("new",) and NEW.settled(NEW.since + 120)
    assert OLD.sent(0.0) == "old" and OLD.accepted(0.0) == ("old",)


def test_epochs_are_read_as_they_were_written_and_by_other_releases() -> None:
    assert Epochs.read(NEW.text()) == NEW and Epochs.read(OLD.text()) == OLD
    later = NEW.text().replace("{", '{"more": 1, ', 1)
    assert Epochs.read(later) == NEW


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"newest": "", "since": 1, "overlap": 1}', "7"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"epoch|char 0"):
        Epochs.read(text)
