"""What a trained world model carries: use of its latents, gradients into its modules, curves of its training.

Everything is computed with the modes of the latents, as scoring takes them, except for gradients, which are
those that training would follow. What can be *read off* the state is measured by :mod:`jaxguard.diagnosis`.
"""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxguard.config import Config, ModelConfig, Stage2Config
from jaxguard.evaluation.wording import number
from jaxguard.training.episodes import Episodes, bucket, epoch_batches, make_batch
from jaxguard.training.state import loss_function
from jaxguard.types import JaxguardError
from jaxguard.world_model import latents
from jaxguard.world_model.losses import Batch
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.rollout import observe
from jaxguard.world_model.rssm import encode_instruction, encode_steps, prior_logits, step_weights

MODULES = (
    "obs_encoder", "act_encoder", "ins_encoder", "init", "posterior", "core", "prior", "predictor",
    "adapter", "hazard_head", "prefix_head",
)  # fmt: skip
SOURCES = {"h": "state h", "z": "latent z", "step": "current step"}
_ROWS = 32  # trajectories per rollout; more than one, because a single row has indices for latents
_BATCHES = 4  # for gradients
_FEWEST = 5  # trajectories behind a point of a curve over steps


class DiagnosisError(JaxguardError):
    """A run whose world model cannot be looked into."""


@dataclass(frozen=True, eq=False)
class States:
    """The model along N steps, trajectory after trajectory; D, S as in the model.

    Attributes:
        h: ``[N, D]`` state after the call of step t, ``h_{t+1}``: what the prior and the risk heads read.
        z: ``[N, S]`` class of each categorical of ``z_t``.
        entropy: ``[N, S]`` of the posterior of ``z_t``, nats.
        kl: ``[N]`` KL of posterior and prior of ``z_{t+1}``, nats; NaN where no new observation followed.
        owner: ``[N]`` trajectory, as its index in the episodes.
        position: ``[N]`` step within it.
    """

    h: np.ndarray
    z: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    owner: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class LatentUse:
    """How much the S categoricals of C classes are used.

    Attributes:
        entropy: Mean posterior entropy of each categorical, nats; log C says nothing, 0 is certain.
        effective: Effective number of classes of each (:func:`effective_classes`): 1 says nothing, C is all.
        classes: C.
        kl: Mean KL of posterior and prior, nats: what an observation adds to the prediction.
        kl_above: Share of steps whose KL exceeds ``free_nats``; no KL gradient comes from the others.
        kl_by_step: Mean KL of the first, second, ... observation that followed a call.
        steps: Steps behind entropy and use.
    """

    entropy: tuple[float, ...]
    effective: tuple[float, ...]
    classes: int
    kl: float
    kl_above: float
    kl_by_step: tuple[float, ...]
    steps: int

    @property
    def in_use(self) -> float:
        """Mean of ``effective``."""
        return float(np.mean(self.effective))

    @property
    def entropy_share(self) -> float:
        """Mean entropy as a share of log C."""
        return float(np.mean(self.entropy) / np.log(self.classes))


@dataclass(frozen=True)
class Probe:
    """How well a logistic regression reads something off the model; NaN where a class is too rare.

    Attributes:
        target: What was to be read.
        parameters: After which stage; empty for the current step's embeddings, which have none.
        source: A key of :data:`SOURCES`.
        auroc: On the half it was not fitted on; the mean over classes of one against the rest.
        n: Steps behind it.
        accuracy: Share of steps whose most probable class is right.
        majority: Share of the most frequent class: what a constant answer reaches.
        lag: Steps between what was to be read and the state; None where that has no meaning.
    """

    target: str
    parameters: str
    source: str
    auroc: float
    n: int
    accuracy: float
    majority: float
    lag: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that the page shows; ``latents`` and ``gradients`` by parameter set, after which stage.

    Attributes:
        title: Name of the run.
        facts: Numbers of trajectories and steps, settings.
        free_nats: KL below which stage 1 does not push.
        latents: Use of the latents.
        gradients: Parameter set -> loss (``"stage 1"``, ``"stage 2"``) -> module -> norm.
        rates: Loss -> module -> what its stage trains it at: full, scaled or frozen.
        probes: Results of all probes.
        curves: Stage -> rows of ``curves.csv``.
    """

    title: str
    facts: Mapping[str, Any]
    free_nats: float
    latents: Mapping[str, LatentUse]
    gradients: Mapping[str, Mapping[str, Mapping[str, float]]]
    rates: Mapping[str, Mapping[str, str]]
    probes: tuple[Probe, ...]
    curves: Mapping[str, tuple[Mapping[str, Any], ...]]

    def by_target(self, *, lags: bool | None = None) -> dict[str, dict[tuple[str, str], Probe]]:
        """Probes by target, then (parameters, source); ``lags`` keeps those that have a lag, or the others."""
        found: dict[str, dict[tuple[str, str], Probe]] = {}
        for probe in self.probes:
            if lags is None or (probe.lag is not None) == lags:
                found.setdefault(probe.target, {})[probe.parameters, probe.source] = probe
        return found

    def to_json(self) -> str:
        """As text; NaN and infinities become null."""
        finite = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return json.dumps(finite, indent=2, allow_nan=False)


@functools.partial(jax.jit, static_argnums=0)
def _rollout(config: ModelConfig, params: Params, batch: Batch) -> tuple[jax.Array, ...]:
    w = step_weights(build(config, params), config)
    x = encode_steps(w, config, batch.obs, batch.act)
    rollout = observe(w, config, encode_instruction(w, batch.ins).h0, x, None)
    h = rollout.h[:, 1:-1]  # the scan ran one step further for the posterior of the last observation
    post = latents.log_probs(rollout.post_logits, config.unimix)
    prior = latents.log_probs(prior_logits(w, config, h), config.unimix)
    entropy = -(jnp.exp(post) * post).sum(axis=-1)
    kl = jnp.where(batch.target > 0, latents.kl(post[:, 1:], prior), jnp.nan)
    return h, rollout.post_logits[:, :-1].argmax(axis=-1), entropy[:, :-1], kl


def states(config: ModelConfig, params: Params, episodes: Episodes) -> States:
    """Runs the model over all steps of ``episodes``, in their order."""
    lengths = episodes.lengths
    found: list[tuple[np.ndarray, ...]] = [()] * len(episodes)
    for indices in epoch_batches(lengths, _ROWS, 0, 0):
        batch = make_batch(episodes, indices, _ROWS, Stage2Config())  # risk targets are not read
        arrays = [np.asarray(a) for a in _rollout(config, params, batch)]
        for row, i in enumerate(indices):
            found[i] = tuple(a[row, : lengths[i]] for a in arrays)
    h, z, entropy, kl = (np.concatenate(column) for column in zip(*found, strict=True))
    return States(
        h, z, entropy, kl, np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths])
    )


def effective_classes(usage: np.ndarray) -> np.ndarray:
    """Exponential of the entropy of ``usage`` ``[..., C]``, shares that sum to 1: ``[...]`` between 1 and C."""
    logs = np.log(usage, where=usage > 0, out=np.zeros_like(usage, dtype=float))
    return np.exp(-(usage * logs).sum(axis=-1))


def latent_use(found: States, classes: int, free_nats: float) -> LatentUse:
    """Sums :func:`states` up; ``free_nats`` is that of stage 1."""
    usage = np.stack([(found.z == c).mean(axis=0) for c in range(classes)], axis=-1)
    known = np.isfinite(found.kl)
    kl, position = found.kl[known], found.position[known]
    counts = np.bincount(position)
    sums = np.bincount(position, weights=kl)
    # Later steps are those of ever fewer trajectories; a gap would shift what follows it.
    end = int(np.argmax(np.r_[counts, 0] < min(_FEWEST, counts.max(initial=1))))
    return LatentUse(
        entropy=tuple(found.entropy.mean(axis=0).tolist()),
        effective=tuple(effective_classes(usage).tolist()),
        classes=classes,
        kl=float(kl.mean()) if len(kl) else float("nan"),
        kl_above=float((kl > free_nats).mean()) if len(kl) else float("nan"),
        kl_by_step=tuple((sums[:end] / counts[:end]).tolist()),
        steps=len(found.owner),
    )


def _gradient(config: Config, stage: int) -> Callable[[Params, Batch, jax.Array], dict[str, jax.Array]]:
    loss = loss_function(config, stage)

    def norms(params: Params, batch: Batch, key: jax.Array) -> dict[str, jax.Array]:
        grads, _ = jax.grad(loss, has_aux=True)(params, batch, key)
        return {name: optax.tree.norm(grads[name]) for name in MODULES}

    return jax.jit(norms)


def gradient_norms(
    config: Config, parameters: Mapping[str, Params], episodes: Episodes
) -> dict[str, dict[str, dict[str, float]]]:
    """Mean norm of the gradient into each module over a few batches, before clipping.

    Returns:
        Name of the parameter set -> ``"stage 1"`` or ``"stage 2"`` (whose loss) -> module -> norm.
    """
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in parameters}
    for stage, settings in ((1, config.stage1), (2, config.stage2)):
        norms = _gradient(config, stage)
        every = epoch_batches(episodes.lengths, settings.batch_size, 0, 0)
        sizes = [bucket(int(episodes.lengths[indices].max())) for indices in every]
        common = max(sizes, key=sizes.count)  # of one size, because each size compiles for seconds
        chosen = [indices for indices, size in zip(every, sizes, strict=True) if size == common][:_BATCHES]
        batches = [make_batch(episodes, indices, settings.batch_size, config.stage2) for indices in chosen]
        # The default generator takes ten times as long to compile.
        keys = jax.random.split(jax.random.key(config.train.seed, impl="rbg"), len(batches))
        for name, params in parameters.items():
            of = [norms(params, batch, key) for batch, key in zip(batches, keys, strict=True)]
            found[name][f"stage {stage}"] = {m: float(np.mean([o[m] for o in of])) for m in MODULES}
    return found


def read_curves(path: Path) -> tuple[dict[str, Any], ...]:
    """Rows of a ``curves.csv``: ``split`` is text, every other cell a number; empty cells are left out.

    Raises:
        DiagnosisError: the file is missing, or a cell is not a number that training writes.
    """
    if not path.exists():
        raise DiagnosisError(f"curves {path}: no such file, expected the one that `jaxguard train` wrote")
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            try:
                found: dict[str, Any] = {k: v if k == "split" else float(v) for k, v in row.items() if v}
            except (TypeError, ValueError) as error:  # the former for more cells than the header names
                raise DiagnosisError(f"curves {path}, line {line}: {error}, expected numbers") from error
            if not 0 <= found.get("step", -1) < math.inf:
                raise DiagnosisError(
                    f"curves {path}, line {line}: step is {found.get('step', 'missing')}, expected a number from 0"
                )
            rows.append(found)
    return tuple(rows)


def render(diagnosis: Diagnosis) -> str:
    """The main figures as plain text, at most 100 columns wide."""
    d = diagnosis
    lines = [f"{'':28}{'entropy':>9}{'of log C':>9}{'classes':>9}{'KL':>9}{'> free':>9}"]
    for name, use in d.latents.items():
        values = (np.mean(use.entropy), use.entropy_share, use.in_use, use.kl, use.kl_above)
        lines.append(f"{name:28}" + "".join(f"{number(float(v)):>9}" for v in values))
    heads = [f"{source}, {name.split(maxsplit=1)[-1]}" for name in d.latents for source in ("h", "z")]
    lines += ["", f"{'AUROC of probes':33}{'n':>7}" + "".join(f"{head:>12}" for head in ("step", *heads))]
    for target, of in d.by_target().items():
        cells = "".join(f"{number(p.auroc):>12}" for p in of.values())
        lines.append(f"{target[:32]:33}{of['', 'step'].n:>7,}{cells}")
    return "\n".join(lines) + "\n"
