"""Logits of trajectories: from a store or an encoder, in any order, and of nothing but what the settings let in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from guard_samples import DIM, FakeEncoder
from route_samples import (
    CONFIG,
    TRAJECTORIES,
    all_logits,
    bare_router,
    configured,
    fresh_router,
    routed_router,
    trajectory,
)

from jaxguard.config import DataConfig
from jaxguard.decision.routing import RoutingError
from jaxguard.features.embed import embed
from jaxguard.features.store import FeatureStore, MissingTexts
from jaxguard.router import Router, RouterError, service_of
from jaxguard.traces.snapshots import SnapshotError
from jaxguard.types import Step, Trajectory

pytestmark = pytest.mark.usefixtures("toy_size")
LONG = TRAJECTORIES[8]  # 18 steps, with a memory


def logits(router: Router, *trajectories: Trajectory) -> list[np.ndarray]:
    by_position = {position: values for position, _, values in router.logits(trajectories)}
    return [by_position[i] for i in range(len(trajectories))]


def test_every_trajectory_comes_back_with_its_position() -> None:
    found = list(bare_router().logits(iter(TRAJECTORIES)))
    assert sorted(position for position, _, _ in found) == list(range(len(TRAJECTORIES)))
    for position, t, values in found:
        assert t is TRAJECTORIES[position]
        assert values.shape == (len(t), 17)
        assert np.isfinite(values).all()


def test_company_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxguard.router._AHEAD", 3)
    for _, t, values in bare_router().logits(TRAJECTORIES):
        np.testing.assert_allclose(values, all_logits()[t.id], atol=1e-5)
    (alone,) = logits(bare_router(), LONG)
    np.testing.assert_allclose(alone, all_logits()[LONG.id], atol=1e-5)


def test_a_store_gives_the_logits_of_the_encoder(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    store = FeatureStore.create_or_open(tmp_path / "store", encoder.fingerprint, DIM)
    embed(TRAJECTORIES, store, encoder)
    for _, t, values in bare_router().logits(TRAJECTORIES, store):
        np.testing.assert_allclose(values, all_logits()[t.id], atol=1e-5)
    with pytest.raises(MissingTexts, match=r"have no vector.*with --router"):
        list(bare_router().logits([Trajectory("x", "an unknown task", (Step("t", {}, "0"),))], store))
    other = FeatureStore.create_or_open(tmp_path / "other", FakeEncoder(layer=2).fingerprint, DIM)
    with pytest.raises(
        RouterError, match=r"feature store .*: made by another encoder than this router's \(layer: 2 !="
    ):
        list(bare_router().logits(TRAJECTORIES, other))


def test_later_steps_do_not_change_earlier_logits() -> None:
    changed = dataclasses.replace(LONG, steps=(*LONG.steps[:9], Step("other", {"path": "file1.txt"}, "z", "new")))
    one, two = logits(bare_router(), LONG, changed)
    np.testing.assert_allclose(one[:9], two[:9], atol=1e-5)
    assert (np.abs(one[9] - two[9]) > 1e-3).any()


def test_memory_that_is_switched_off_is_not_read() -> None:
    plain = dataclasses.replace(LONG, metadata={**LONG.metadata, "memory": ""})
    read, unread = (logits(router, LONG, plain) for router in (bare_router(), configured(memory=False)))
    assert (np.abs(read[0] - read[1]).max(axis=1) > 1e-3).all()
    np.testing.assert_array_equal(*unread)
    np.testing.assert_allclose(unread[0], read[1], atol=1e-5)


def test_grounding_that_is_switched_off_is_not_read() -> None:
    """The same texts, but a call that names another thing of which other things were said: only its action differs."""
    encoder = FakeEncoder()
    vector = encoder.vector
    encoder.vector = lambda text: vector("same call" if text.startswith("tool") else text)  # type: ignore[method-assign]
    named = dataclasses.replace(LONG.steps[5], arguments={"path": "file0.txt", "t": 5})
    assert named != LONG.steps[5]
    other = dataclasses.replace(LONG, steps=(*LONG.steps[:5], named))
    found = {}
    for name, router in (("on", bare_router()), ("off", configured(grounding=False))):
        own = dataclasses.replace(router, encoder=encoder)
        one, two = logits(own, LONG, other)
        found[name] = np.abs(one[5] - two[5]).max()
    assert found["on"] > 1e-3
    assert found["off"] < 1e-5


def test_without_recurrence_history_does_not_count() -> None:
    """Of the history, only what grounding quotes is read: without it nothing is."""
    other = dataclasses.replace(LONG, steps=(Step("first", {}, "0"), *LONG.steps[1:]))
    for router, differs in (
        (configured(recurrence=False, grounding=False), False),
        (configured(grounding=False), True),
    ):
        one, two = logits(router, LONG, other)
        assert (np.abs(one[1:] - two[1:]) > 1e-5).any() == differs


@pytest.mark.parametrize("factor", [np.inf, 1e20])
def test_a_vector_that_no_model_can_read_routes_to_ask(factor: float) -> None:
    router = fresh_router()
    bad, sound = LONG.steps[4].observation, FakeEncoder().vector
    router.encoder.vector = lambda text: sound(text) * np.float32(factor if text == bad else 1)  # type: ignore[attr-defined]
    (found,) = logits(router, LONG)
    assert np.isfinite(found[:4]).all()
    assert np.isnan(found[4:]).all()
    assert router.routing is not None
    assert (router.routing.route(found[4:, :3]) == 1).all()


def test_what_moves_a_logit_moves_the_source() -> None:
    base = bare_router()
    moved = {k: v + np.float32(1) for k, v in base.params["head"]["mlp"]["out"].items()}
    head = {**base.params["head"], "mlp": {**base.params["head"]["mlp"], "out": moved}}
    others = [
        configured(memory=False), configured(grounding=False), configured(recurrence=False),
        dataclasses.replace(base, params={**base.params, "head": head}),
        dataclasses.replace(base, encoder=FakeEncoder(layer=2)),
        dataclasses.replace(base, config=dataclasses.replace(CONFIG, data=DataConfig(thought=True))),
    ]  # fmt: skip
    assert len({base.source, *(other.source for other in others)}) == 7
    assert dataclasses.replace(base, config=dataclasses.replace(CONFIG, name="x")).source == base.source
    routing = routed_router().routing
    assert routing is not None
    for other in others:
        with pytest.raises(RoutingError, match="fingerprint of the logits"):
            other.routed(routing)


def test_the_service_of_a_trajectory() -> None:
    assert service_of({}) == service_of({"service": None, "domain": ""}) == ""
    assert service_of({"domain": "bank"}) == "bank"
    assert service_of({"service": "mail", "domain": "office"}) == "mail"
    with pytest.raises(RouterError, match="metadata service: got int, expected text or None"):
        service_of({"service": 0})


def test_a_memory_that_is_no_text_is_an_error() -> None:
    with pytest.raises(SnapshotError, match="memory is 3"):
        list(bare_router().logits([trajectory(1, 2, memory=3)]))
