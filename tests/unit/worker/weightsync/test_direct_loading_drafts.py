"""One stream of buckets writes a version into the served model and its draft, or fails for both."""

import json
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.protocol.direct_load import AGENT, MARK, DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.sglang_plugin import engine_ranks, hooks, versions
from grpo_worker.weightsync.sglang_plugin.loader import DirectLoader
from grpo_worker.weightsync.sglang_plugin.recipes import Recipes
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError, view_of
from support.direct_loads import DOWN, ORDER, Model, Wire, fill, load, specs

BUCKETS = [specs(ORDER), specs(DOWN)]


class Draft(torch.nn.Module):
    """Model that reads two tensors of the last bucket, and drops the others as SGLang's drafts do."""

    def __init__(self, names: Iterable[str] = DOWN[:2]) -> None:
        super().__init__()
        self.names = list(names)
        self.own = torch.nn.Parameter(torch.zeros(2, *torch.Size((5, 3))), requires_grad=False)
        self.derived = torch.zeros(2)
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.names:
                self.own.data[self.names.index(name)].copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.calls += 1
        self.derived = self.own.sum(dim=(1, 2))

    def holds(self, seed: int) -> bool:
        flat = fill(BUCKETS[1], seed + 1)
        wanted = torch.stack([view_of(flat, spec) for spec in BUCKETS[1] if spec.name in self.names])
        return torch.equal(self.own, wanted) and torch.equal(self.derived, wanted.sum(dim=(1, 2)))


def test_each_bucket_is_received_once_and_written_into_both_models() -> None:
    model, draft = Model(), Draft()
    loader = DirectLoader([model, draft], "cpu")
    first = load(loader, BUCKETS, seed=1)
    assert first.recorded == 2 and draft.holds(1)
    assert first.loaded == set(ORDER) | set(DOWN)
    calls = draft.calls
    assert load(loader, BUCKETS, seed=7).recorded == 0
    assert draft.holds(7) and draft.calls == calls + 1, "only the bucket that has tensors of the draft"
    alone = Model()
    load(DirectLoader([alone], "cpu"), BUCKETS, seed=7)
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_draft_that_cannot_be_written_fails_the_version_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = Model(), Draft()
    loader = DirectLoader([model, draft], "cpu")
    load(loader, BUCKETS, seed=1)
    with monkeypatch.context() as broken:
        broken.setattr(draft, "post_load_weights", lambda: 1 / 0)
        with pytest.raises(DirectLoadError, match="bucket 1: ZeroDivisionError"):
            load(loader, BUCKETS, seed=5)
    assert load(loader, BUCKETS, seed=7).recorded == 2, "both models are loaded by their own loaders again"
    assert draft.holds(7)


def test_a_version_without_the_drafts_tensors_is_refused() -> None:
    loader = DirectLoader([Model(), Draft(["model.layers.61.eh_proj.weight"])], "cpu")
    with pytest.raises(DirectLoadError, match=r"no tensors of Draft, .*multiTokenPrediction to true"):
        load(loader, BUCKETS, seed=1)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a rank's served model and draft as SGLang holds them, with empty state of the plugin."""
    monkeypatch.setattr(hooks, "_drafts", [])
    monkeypatch.setattr(versions, "_loaders", {})
    recipes = Recipes()
    monkeypatch.setattr(versions, "RECIPES", recipes)
    monkeypatch.setattr(engine_ranks, "gather", lambda value: [value])

    def updater(model: Any, draft: bool) -> Any:
        runner = SimpleNamespace(model=model, is_draft_worker=draft)
        hooks._on_load_model(lambda _: None, runner)
        return SimpleNamespace(get_model=lambda: model, get_model_runner=lambda: runner, device="cpu")

    served, draft = Model(), Draft()
    served.config = SimpleNamespace(num_hidden_layers=1)  # type: ignore[assignment]
    updaters = {"served": updater(served, False), "draft": updater(draft, True)}
    return SimpleNamespace(**updaters, draft_model=draft, recipes=recipes)


def announced(engine: Any, seed: int, buckets: Any = BUCKETS, bad: int = -1, record: bool = False) -> Any:
    flats = [fill(bucket, seed + index) for index, bucket in enumerate(buckets)]
    prints = [int(fingerprint(flat)) for flat in flats]
    if bad >= 0:
        flats[bad][0] ^= 1
    request = DirectLoad("p", tuple(map(len, buckets)), record)
    load = partial(
        versions.load_version, hooks._models(engine.served), "cpu", request, buckets, Wire(flats, prints)
    )
    return hooks._Announced(load)


def refuse(*_: Any) -> Any:
    raise AssertionError("SGLang's own loading must not run")


def test_sglangs_calls_for_both_models_are_one_load_with_one_answer(engine: Any) -> None:
    weights = announced(engine, 3)
    success, answer = hooks._on_load(refuse, engine.served, weights)
    assert success and engine.draft_model.holds(3), "the draft is written by the call for the served model"
    assert json.loads(answer)["recorded"] == 2
    calls = engine.draft_model.calls
    assert hooks._on_load(refuse, engine.draft, weights) == (success, answer)
    assert engine.draft_model.calls == calls


def test_a_failed_load_is_the_answer_for_both_models(engine: Any) -> None:
    weights = announced(engine, 3, bad=1)
    success, answer = hooks._on_load(refuse, engine.served, weights)
    assert not success and "bucket 1: its bytes are not those that were sent" in answer
    assert hooks._on_load(refuse, engine.draft, weights) == (False, answer)


def test_a_staged_load_records_what_links_need_before_the_engine_serves(engine: Any) -> None:
    bucket = BUCKETS[1]
    weights = announced(engine, 4, [bucket], record=True)
    success, answer = hooks._on_load(refuse, engine.served, weights)
    assert success and engine.draft_model.holds(3), answer
    rows = [TensorRow(spec.name, spec.shape, dtype_name(spec.dtype)) for spec in reversed(bucket)]
    models = engine.served.get_model(), engine.draft_model
    kept = [engine.recipes.of(model, rows).kept() for model in models]
    assert engine.recipes.recorded == 2 and engine.draft_model.holds(3), "nothing was recorded again"
    assert kept[0].keys() == set(DOWN) and kept[1].keys() == set(DOWN[:2])


def test_the_draft_alone_is_not_loaded(engine: Any) -> None:
    success, answer = hooks._on_load(refuse, engine.draft, announced(engine, 3))
    assert not success and "use selector all" in answer


@pytest.mark.parametrize("drafts", [True, False])
def test_an_engine_that_drafts_must_load_the_layer_after_the_last(
    drafts: bool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not drafts:
        hooks._drafts.clear()
    names = {"bias": "model.layers.1.enorm.weight"}  # the tensor keeps its place and has a name of the layer
    renamed = [
        type(spec)(names.get(spec.name, spec.name), spec.dtype, spec.shape, spec.start, spec.nbytes)
        for spec in BUCKETS[0]
    ]
    weights = announced(engine, 3, [renamed, BUCKETS[1]])
    success, answer = hooks._on_load(refuse, engine.served, weights)
    assert success is not drafts
    if drafts:
        assert "no rank of the engine loaded model.layers.1.enorm.weight (1 tensors)" in answer


def test_an_engine_that_drafts_supports_direct_loads(engine: Any) -> None:
    engine.served.tp_rank = 0
    answers = []
    for name in (f"{AGENT}0", "other"):
        engine.served._model_update_group = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks, "_join_agent_group", lambda *_: (True, "joined"))
            answers.append(hooks._on_join(lambda *_: (True, "ok"), engine.served, "h", 1, 1, 2, name))
    assert answers == [(True, f"joined {MARK}"), (True, f"ok {MARK}")]
