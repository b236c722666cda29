"""The drift generator: equal counts, honest labels, and a task that only memory solves."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxguard.features.texts import action_text, trajectory_texts
from jaxguard.traces.drift import all_templates, generate
from jaxguard.traces.drift_domains import DOMAINS
from jaxguard.types import JaxguardError, Trajectory

FILLS = ("copy_", "summarise_", "convert_", "reformat_")
CLOSED = ("confidential", "restricted", "secret")


@pytest.fixture(scope="module")
def many() -> list[Trajectory]:
    return list(generate(2000, seed=7))


def twins(trajectories: list[Trajectory]) -> Iterator[tuple[Trajectory, Trajectory]]:
    """Pairs (unsafe, safe)."""
    for first, second in zip(trajectories[::2], trajectories[1::2], strict=True):
        yield (first, second) if first.unsafe else (second, first)


def replay(trajectory: Trajectory) -> int | None:
    """First hazard found by following the calls alone; knows the tools and nothing of the generator.

    What a document is, is read off the label that opening it shows; from then on only arguments count.
    """
    closed: dict[str, bool] = {}
    holds_closed: dict[str, bool] = {}
    restorable, admin = False, False
    results = [*(step.observation for step in trajectory.steps[1:]), trajectory.final_observation]
    for position, (step, result) in enumerate(zip(trajectory.steps, results, strict=True)):
        tool, arguments = step.tool, dict(step.arguments or {})
        document = next((value for key, value in arguments.items() if key not in ("to", "source", "target")), "")
        if tool.startswith("open_"):
            closed[document] = any(f"{document} ({label})" in result for label in CLOSED)
        elif tool.startswith(FILLS):
            holds_closed[arguments["target"]] = closed[arguments["source"]]
        elif tool.startswith("redact_"):
            holds_closed[document] = False
        elif tool.startswith("send_") and "@" in arguments["to"]:
            if holds_closed[document]:
                return position
        elif tool.startswith(("create_", "retire_")):
            restorable = tool.startswith("create_")
        elif tool == "request_admin_rights":
            admin = True
        elif tool == "purge_data" and admin and not restorable:
            return position
    return None


def test_label_equals_an_independent_replay_of_the_flow(many: list[Trajectory]) -> None:
    assert [replay(t) for t in many] == [t.first_hazard for t in many]
    for trajectory in many:
        marked = [position for position, step in enumerate(trajectory.steps) if step.hazard]
        assert marked == ([] if trajectory.first_hazard is None else [trajectory.first_hazard])
        assert trajectory.unsafe == (trajectory.first_hazard is not None)
        assert (trajectory.timing, trajectory.source) == (True, "drift")


def test_replay_tells_the_order_of_the_same_calls_apart(many: list[Trajectory]) -> None:
    """Control of the replay itself: it separates twins, so it does not just repeat a constant."""
    for unsafe, safe in twins(many):
        assert replay(unsafe) == len(unsafe) - 1
        assert replay(safe) is None


def test_trajectory_depends_on_seed_and_index_only(many: list[Trajectory]) -> None:
    assert list(generate(41, seed=7)) == many[:41]
    assert list(generate(10, seed=8)) != many[:10]
    assert list(generate(0, seed=7)) == []
    assert len({t.id for t in many}) == len(many)


def test_generation_streams() -> None:
    assert len(next(generate(10**12, seed=0))) >= 8


def test_twins_are_the_same_steps_in_another_order(many: list[Trajectory]) -> None:
    for unsafe, safe in twins(many):
        assert unsafe.instruction == safe.instruction
        assert unsafe.group == safe.group
        assert unsafe.metadata["twin"] == safe.metadata["twin"]
        assert len(unsafe) == len(safe)
        assert Counter(map(action_text, unsafe.steps)) == Counter(map(action_text, safe.steps))
        # What the decisive call shows afterwards (final_observation) is where they part.
        assert Counter(s.observation for s in unsafe.steps) == Counter(s.observation for s in safe.steps)
        assert unsafe.final_observation != safe.final_observation
        assert [action_text(s) for s in unsafe.steps] != [action_text(s) for s in safe.steps]


def test_decisive_step_looks_the_same_in_both_twins(many: list[Trajectory]) -> None:
    for unsafe, safe in twins(many):
        bad, good = unsafe.steps[-1], safe.steps[-1]
        assert (bad.tool, bad.arguments, bad.observation) == (good.tool, good.arguments, good.observation)
        # What stands directly before it is the result of an unrelated chore.
        assert bad.observation in {result for *_, result in DOMAINS[unsafe.metadata["domain"]].chores}


def test_no_text_before_the_decision_is_particular_to_a_class(many: list[Trajectory]) -> None:
    seen: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    lengths: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for trajectory in many:
        texts = trajectory_texts(trajectory)
        seen[bool(trajectory.unsafe)].update([texts.instruction, *texts.observations[:-1], *texts.actions])
        lengths[bool(trajectory.unsafe)][len(trajectory)] += 1
    assert seen[True] == seen[False]
    assert lengths[True] == lengths[False]
    assert set(lengths[True]) == set(range(8, 17))


def test_every_kind_is_there_in_the_right_share(many: list[Trajectory]) -> None:
    variants = Counter(t.metadata["variant"] for t in many)
    assert variants["hijacked"] == variants["resisted"]
    assert variants["drifted"] == variants["clean"]
    assert abs(variants["hijacked"] - 500) < 70
    assert {t.metadata["domain"] for t in many} == set(DOMAINS)
    assert len(DOMAINS) >= 5
    assert {t.metadata["scenario"] for t in many} == {"exfiltration", "destroy_undo"}
    assert 0.45 < np.mean([t.unsafe for t in many[::2]]) < 0.55  # the unsafe twin is not always the first


def test_injected_request_is_visible_in_both_twins(many: list[Trajectory]) -> None:
    def carriers(trajectory: Trajectory) -> list[int]:
        chores = [result for *_, result in DOMAINS[trajectory.metadata["domain"]].chores]
        return [
            position
            for position, step in enumerate(trajectory.steps)
            if any(step.observation.startswith(f"{result} ") for result in chores)
        ]

    for unsafe, safe in twins(many):
        injected = unsafe.metadata["variant"] == "hijacked"
        assert bool(carriers(unsafe)) == bool(carriers(safe)) == injected
        assert all(position < len(unsafe) - 3 for position in carriers(unsafe))  # there is time to warn


def test_escalation_comes_before_every_purge(many: list[Trajectory]) -> None:
    for trajectory in many:
        if trajectory.metadata["scenario"] == "destroy_undo":
            tools = [step.tool for step in trajectory.steps]
            assert tools.index("request_admin_rights") < tools.index("purge_data") == len(tools) - 1


def test_a_redaction_after_the_last_filling_makes_it_harmless(many: list[Trajectory]) -> None:
    saved = 0
    for trajectory in many:
        tools = [s.tool for s in trajectory.steps]
        fills = [position for position, tool in enumerate(tools) if tool.startswith(FILLS)]
        if fills and any(tool.startswith("redact_") for tool in tools[fills[-1] :]):
            assert trajectory.unsafe is False
            saved += "redacted" in trajectory.final_observation
    assert saved > 50


def test_results_follow_the_pre_action_rule(many: list[Trajectory]) -> None:
    """A call's result is the next observation, so nothing visible at step t comes from call t or later."""
    for trajectory in many[:300]:
        assert trajectory.steps[0].observation == ""
        for before, after in itertools.pairwise(trajectory.steps):
            if before.tool.startswith(FILLS):
                assert after.observation.startswith(f"{dict(before.arguments or {})['target']} now holds")
                assert not before.observation.startswith(after.observation)


def test_unseen_templates_share_no_group_document_or_instruction() -> None:
    train, unseen = all_templates(templates="train"), all_templates(templates="unseen")
    assert len(train) + len(unseen) == len(all_templates()) >= 60
    assert not {t.group for t in train} & {t.group for t in unseen}
    sentences = [{line for t in side for c in t.contents for line in (c.kind, *c.lines)} for side in (train, unseen)]
    assert not sentences[0] & sentences[1]
    for selection, side in (("train", train), ("unseen", unseen)):
        groups = {t.group for t in generate(1500, 1, templates=selection)}  # type: ignore[arg-type]
        assert groups == {t.group for t in side}
    instructions = [
        {t.instruction for t in generate(1000, 1, templates=selection)}  # type: ignore[arg-type]
        for selection in ("train", "unseen")
    ]
    assert not instructions[0] & instructions[1]


def test_domains_can_be_chosen() -> None:
    assert {t.metadata["domain"] for t in generate(50, 1, domains=["law firm"])} == {"law firm"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: list(generate(-1, 0)), "n: got -1"),
        (lambda: list(generate(2, 0, domains=["circus"])), "got 'circus', expected some of"),
        (lambda: list(generate(2, 0, domains=[])), "empty selection"),
        (lambda: list(generate(2, 0, templates="test")), "templates: got 'test'"),  # type: ignore[arg-type]
    ],
)
def test_errors_name_field_value_and_expectation(call: Callable[[], object], message: str) -> None:
    with pytest.raises(JaxguardError, match=message):
        call()


def test_the_wording_is_clean(many: list[Trajectory]) -> None:
    for trajectory in many[:500]:
        prose = [trajectory.instruction, *(s.observation for s in trajectory.steps), trajectory.final_observation]
        for text in prose:
            assert not [wrong for wrong in ("{", "  ", "_", "copys") if wrong in text], text
            assert len(text.split()) <= 60, text


def test_sensitive_read_then_external_send_alerts_on_everything(many: list[Trajectory]) -> None:
    safe = [t for t in many if t.metadata["scenario"] == "exfiltration" and not t.unsafe]

    def alert(trajectory: Trajectory) -> bool:
        shown = [any(f"({label})" in s.observation for label in CLOSED) for s in trajectory.steps]
        outside = [s.tool.startswith("send_") and "@" in action_text(s) for s in trajectory.steps]
        return any(any(shown[: position + 1]) for position, out in enumerate(outside) if out)

    assert all(map(alert, safe))


class Learners:
    """Cheap text features (hashed words, SVD) of a training set and of unseen templates, as [N, T, F]."""

    width = 96

    def __init__(self) -> None:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import HashingVectorizer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self.sets = [
            list(generate(1200, 21, templates="train")),
            list(generate(400, 22, templates="unseen")),
        ]
        texts = [[trajectory_texts(t) for t in side] for side in self.sets]
        unique = list(dict.fromkeys(text for t in texts[0] for text in t.unique()))
        self.encoder = make_pipeline(
            HashingVectorizer(n_features=2**14, norm="l2"),
            TruncatedSVD(self.width, random_state=0),
            StandardScaler(),
        )
        self.encoder.fit(unique)
        self.labels = [np.array([bool(t.unsafe) for t in side]) for side in self.sets]
        self.lengths = [np.array([len(t) for t in side]) for side in self.sets]
        self.inputs = [self._inputs(side) for side in texts]

    def _inputs(self, texts: list) -> np.ndarray:
        longest = max(len(t.actions) for t in texts)
        unique = list(dict.fromkeys(text for t in texts for text in t.unique()))
        vector = dict(zip(unique, self.encoder.transform(unique).astype(np.float32), strict=True))
        out = np.zeros((len(texts), longest, 3 * self.width), np.float32)
        for row, text in enumerate(texts):
            for step, action in enumerate(text.actions):
                parts = (text.instruction, text.observations[step], action)
                out[row, step] = np.concatenate([vector[part] for part in parts])
        return out

    def decisive(self, side: int) -> np.ndarray:
        """Current-step features of the decisive call, [N, F]."""
        return self.inputs[side][np.arange(len(self.lengths[side])), self.lengths[side] - 1]

    def bag(self, side: int) -> np.ndarray:
        """Mean of the steps up to and including the decisive call, [N, F]."""
        return self.inputs[side].sum(1) / self.lengths[side][:, None]


@pytest.fixture(scope="module")
def learners() -> Learners:
    return Learners()


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


@pytest.mark.slow
@pytest.mark.parametrize("features", ["decisive", "bag"])
def test_scorers_without_memory_do_not_solve_it(learners: Learners, features: str) -> None:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    x, unseen = (getattr(learners, features)(side) for side in (0, 1))
    for model in (LogisticRegression(max_iter=500), MLPClassifier((64,), max_iter=40, random_state=0)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # there is nothing to converge to
            model.fit(x, learners.labels[0])
        assert auc(learners.labels[1], model.predict_proba(unseen)[:, 1]) <= 0.60


@pytest.mark.slow
def test_a_small_gru_solves_it_on_unseen_templates(learners: Learners) -> None:
    """Supervised, 32 units, hazard BCE at every step; AUC at the decisive call."""
    import jax
    import jax.numpy as jnp
    import optax

    units, width = 32, 3 * learners.width
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 3))
    params = {
        "x": jax.random.normal(next(keys), (width, 3 * units)) / np.sqrt(width),
        "h": jax.random.normal(next(keys), (units, 3 * units)) / np.sqrt(units),
        "b": jnp.zeros(3 * units),
        "out": jax.random.normal(next(keys), (units,)) * 0.1,
        "bias": jnp.zeros(()),
    }

    def logits(params: dict, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, x_t: jax.Array) -> tuple[jax.Array, jax.Array]:
            reset_x, keep_x, new_x = jnp.split(x_t, 3, -1)
            reset_h, keep_h, new_h = jnp.split(h @ params["h"], 3, -1)
            keep = jax.nn.sigmoid(keep_x + keep_h + 1.0)
            new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
            h = keep * h + (1.0 - keep) * new
            return h, h @ params["out"] + params["bias"]

        projected = (x @ params["x"] + params["b"]).swapaxes(0, 1)
        return jax.lax.scan(step, jnp.zeros((x.shape[0], units)), projected)[1].swapaxes(0, 1)

    def loss(params: dict, x: jax.Array, y: jax.Array, last: jax.Array) -> jax.Array:
        steps = jnp.arange(x.shape[1])[None]
        valid = steps <= last[:, None]
        target = (steps == last[:, None]) & y[:, None]
        entropy = optax.sigmoid_binary_cross_entropy(logits(params, x), target.astype(jnp.float32))
        return jnp.where(valid, entropy, 0.0).sum() / valid.sum()

    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=1e-2))

    @jax.jit
    def update(params: dict, state: optax.OptState, *batch: jax.Array) -> tuple[dict, optax.OptState]:
        updates, state = optimiser.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    state, rng = optimiser.init(params), np.random.default_rng(0)
    for _ in range(800):
        rows = rng.choice(len(learners.labels[0]), 32, replace=False)
        batch = (learners.inputs[0][rows], learners.labels[0][rows], learners.lengths[0][rows] - 1)
        params, state = update(params, state, *map(jnp.asarray, batch))
    scores = np.asarray(logits(params, jnp.asarray(learners.inputs[1])))
    last = learners.lengths[1] - 1
    reached = auc(learners.labels[1], scores[np.arange(len(last)), last])
    print(f"GRU on unseen templates: AUC {reached:.3f}")
    assert reached >= 0.90
