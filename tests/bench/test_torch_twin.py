"""The PyTorch twin against the product: the same steps, decisions, losses and gradients from the same weights."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxguard.config import MODEL_PRESETS, Config, ModelConfig, Stage2Config
from jaxguard.decision.evidence import FusionParams, evidence
from jaxguard.decision.policy import Cutoffs, decide
from jaxguard.features.encoder import load_encoder
from jaxguard.features.texts import trajectory_texts
from jaxguard.traces.drift import generate
from jaxguard.training.state import loss_function
from jaxguard.world_model import latents
from jaxguard.world_model.losses import Batch
from jaxguard.world_model.packing import Sequence
from jaxguard.world_model.params import Params, flatten, init_params
from jaxguard.world_model.scorer import Scorer

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # two threads that wait for each other on a busy machine take a hundred times longer

from bench.torch_twin import losses, offline, weights  # noqa: E402
from bench.torch_twin.export import StepForExport  # noqa: E402
from bench.torch_twin.folded import FoldedStep  # noqa: E402
from bench.torch_twin.model import Decider  # noqa: E402

RNG = np.random.default_rng(11)
# Gradients of a tiny model take longer to compile than to run.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TINY = ModelConfig(embed_dim=6, deter=8, stoch=2, classes=3, hidden=5, adapter_dim=4)


def perturbed(config: ModelConfig, pooled: bool = True) -> Params:
    """Parameters away from their initial zeros and ones, so that none can be left out unnoticed."""

    def noise(path: tuple, leaf: np.ndarray) -> np.ndarray:
        if path[0].key == "pooled_head":
            return RNG.normal(size=leaf.shape).astype(np.float32) * (0.05 * pooled)
        spread = 0.0 if path[-1].key == "kernel" else 0.2
        return np.asarray(leaf + spread * RNG.normal(size=leaf.shape), np.float32)

    return jax.tree_util.tree_map_with_path(noise, jax.device_get(init_params(config, 3)))


@pytest.fixture(scope="module")
def embedded() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Observations, actions ``[T, E]`` and instruction ``[E]`` of two trajectories."""
    texts = [trajectory_texts(trajectory) for trajectory in generate(2, seed=5)]
    every = list(dict.fromkeys(t for x in texts for t in (*x.observations[:-1], *x.actions, x.instruction)))
    vector = dict(zip(every, load_encoder().encode(every), strict=True))
    return [
        (
            np.stack([vector[t] for t in x.observations[:-1]]),
            np.stack([vector[t] for t in x.actions]),
            vector[x.instruction],
        )
        for x in texts
    ]


@pytest.mark.slow
def test_steps_agree_on_embedded_trajectories(embedded: list) -> None:
    config = MODEL_PRESETS["small"]
    params = perturbed(config)
    scorer, model = Scorer(config, params), weights.twin(config, params)
    assert model.pooled
    risks = []
    for obs, act, ins in embedded:
        state = scorer.start(ins)
        with torch.inference_mode():
            other = model.start(torch.tensor(ins[None]))
            for o, a in zip(obs, act, strict=True):
                state, *expected = scorer.step(state, o, a)
                other, found = model(other, torch.tensor(o[None]), torch.tensor(a[None]))
                np.testing.assert_allclose(found[0], expected, atol=1e-5)
                np.testing.assert_allclose(other.h[0], state.carry[0, : config.deter], atol=1e-5)
                risks.append(expected)
    assert len(risks) > 15
    assert np.ptp(risks, axis=0).min() > 0.01


def test_other_forms_of_the_step_agree() -> None:
    params = perturbed(TINY, pooled=False)
    vectors = RNG.normal(size=(7, TINY.embed_dim)).astype(np.float32)
    scorer = Scorer(TINY, params)
    folded, exported = FoldedStep(TINY, params).eval(), StepForExport(weights.twin(TINY, params)).eval()
    state = scorer.start(vectors[0])
    with torch.inference_mode():
        other = folded.start(torch.tensor(vectors[:1]))
        h, e = exported.start(torch.tensor(vectors[:1]))
        for obs, act in vectors[1:].reshape(3, 2, -1):
            state, *expected = scorer.step(state, obs, act)
            x = torch.tensor(obs[None]), torch.tensor(act[None])
            other, found = folded(other, *x)
            h, also = exported(h, e, *x)
            for risks, moved in ((found, other[0]), (also, h)):
                np.testing.assert_allclose(risks[0], expected, atol=1e-5)
                np.testing.assert_allclose(moved[0], state.carry[0, : TINY.deter], atol=1e-5)


def test_the_offline_loop_agrees_whatever_its_batches() -> None:
    params = perturbed(TINY, pooled=False)
    table = RNG.normal(size=(30, TINY.embed_dim)).astype(np.float32)
    items = [(*RNG.integers(0, 30, size=(2, n)), int(RNG.integers(0, 30))) for n in (3, 1, 7, 7, 2, 12, 5)]
    expected = dict(Scorer(TINY, params).score((Sequence(*item) for item in items), lambda rows: table[rows]))
    for batch in (1, 4, 100):
        found = offline.score(weights.twin(TINY, params), table, items, batch)
        for position, risks in expected.items():
            np.testing.assert_allclose(found[position], risks, atol=1e-5)


def test_weights_survive_the_way_there_and_back(tmp_path: Path) -> None:
    params = perturbed(TINY)
    weights.save(params, tmp_path / "twin.safetensors")
    back = flatten(weights.load(tmp_path / "twin.safetensors", TINY))
    for name, array in flatten(params).items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_evidence_and_decisions_agree() -> None:
    fusion, cutoffs = FusionParams(), Cutoffs(0.7, 0.85)
    risks = RNG.random((5, 40, 2))  # trajectories, steps
    risks[0, 7] = np.nan
    flat = evidence(risks[..., 0].ravel(), risks[..., 1].ravel(), [40] * 5, fusion)
    expected = decide(flat.hazard, flat.fused, cutoffs.block, cutoffs.hold)
    decider = Decider(fusion, cutoffs)
    memory = decider.start(torch.zeros(5, dtype=torch.float64))
    fused, decisions = [], []
    for t in range(40):
        memory, s, d = decider(memory, torch.tensor(risks[:, t]))
        fused.append(s.numpy())
        decisions.append(d.numpy())
    clean = np.ones((5, 40), bool)
    clean[0, 7:] = False
    np.testing.assert_allclose(np.stack(fused, 1)[clean], flat.fused.reshape(5, 40)[clean], atol=1e-12)
    found = np.stack(decisions, 1)
    np.testing.assert_array_equal(found[clean], expected.decision.reshape(5, 40)[clean])
    assert found[0, 7] == expected.decision.reshape(5, 40)[0, 7]
    assert set(np.unique(found[clean])) == {0, 1, 2}


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_loss_and_gradients_agree(stage: int) -> None:
    config = Config(model=TINY)
    params = perturbed(TINY, pooled=False)
    rows, steps = 3, 4
    mask = (np.arange(steps) < np.array([[4], [2], [3]])).astype(np.float32)
    obs, act = RNG.normal(size=(2, rows, steps + 1, TINY.embed_dim)).astype(np.float32)
    labels = (RNG.random((2, rows, steps)) < 0.4).astype(np.float32)
    batch = Batch(obs, act, obs[:, 0] + 1, mask, mask, labels[0], labels[1], mask)
    key = jax.random.key(9)
    gradient = jax.jit(jax.value_and_grad(loss_function(config, stage), has_aux=True), compiler_options=QUICK)
    (value, _), grads = gradient(params, batch, key)

    scan_key, prior_key = jax.random.split(key)
    shape = (TINY.stoch, TINY.classes)
    noise = (
        latents.noise(scan_key, (steps + (stage == 1), rows, *shape)),
        latents.noise(prior_key, (rows, steps, *shape)),
    )
    model = weights.twin(TINY, params).train()
    other = losses.Batch(*(torch.tensor(np.asarray(x)) for x in batch))
    found = losses.loss(model, config, stage, other, *(torch.tensor(np.asarray(x)) for x in noise))
    found.backward()
    np.testing.assert_allclose(found.item(), value, atol=1e-5)
    own = {name: p.grad for name, p in model.named_parameters()}
    nonzero = 0
    for name, expected in weights.to_torch(grads).items():
        grad = np.zeros_like(expected) if own[name] is None else own[name].numpy()
        np.testing.assert_allclose(grad, expected, atol=1e-4, err_msg=name)
        nonzero += bool(np.abs(expected).max() > 1e-3)
    assert nonzero > 20


def test_a_training_step_moves_what_the_partition_says_and_lowers_the_loss() -> None:
    config = Config(model=TINY, stage2=Stage2Config(learning_rate=5e-3))
    model = weights.twin(TINY, perturbed(TINY, pooled=False)).train()
    obs, act = (torch.randn(4, 6, TINY.embed_dim) for _ in range(2))
    ones = torch.ones(4, 5)
    labels = (torch.arange(4) % 2).float()[:, None].expand(4, 5)
    batch = losses.Batch(obs, act, obs[:, 0], ones, ones, labels, labels, ones)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = losses.make_step(model, config, 2)
    values = [step(batch).item() for _ in range(100)]
    moved = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved >= {"adapter", "hazard_head", "prefix_head", "obs_encoder", "prior"}
    assert not moved & {"core", "predictor", "pooled_head"}
    assert np.mean(values[-20:]) < 0.9 * np.mean(values[:20])
