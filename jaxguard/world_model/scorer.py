"""Deterministic scoring with fixed weights: one live step, and many trajectories packed into lanes.

Archives hold trajectories of all lengths. Instead of padding them into batches, :meth:`Scorer.score` runs L
*lanes* side by side, K steps per call; a lane takes up the next trajectory where the previous one ends
(``is_first`` resets its state), so that nearly every step computed is a step wanted, a trajectory may be
longer than any buffer, and there is one compiled shape whatever the archive holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxguard.config import ModelConfig
from jaxguard.types import JaxguardError
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.pooling import (
    Pool,
    PooledInstruction,
    PoolInputs,
    empty_pool,
    pool_inputs,
    pool_instruction,
    pool_step,
    pooled_logit,
    pooled_weights,
)
from jaxguard.world_model.rssm import (
    StepInputs,
    StepWeights,
    encode_instruction,
    encode_steps,
    observe_step,
    read_mode,
    step_weights,
)

LANES = 128
CHUNK = 16
# Distinct instructions per call: one per lane and two starts more; a lane that would exceed it waits.
INSTRUCTIONS = 3 * LANES

Gather = Callable[[np.ndarray], np.ndarray]
Carry = tuple[jax.Array, Pool]
"""``h`` ``[LANES, D]`` and what the lanes' runs have shown."""


class LiveState(NamedTuple):
    """What a session carries between steps, on the device; packed, because every array costs a call some time."""

    carry: jax.Array  # [1, D + 2 + 2E]: h, and the pool (steps, total, top); without a pooled head, E is 0
    given: jax.Array  # [1, 2H + 2E + 1]: what the instruction is to the heads and to the pooled head (weigh, alone)


@dataclass(frozen=True)
class Sequence:
    """One trajectory to score, as row ids of a vector table: ``[T]``, ``[T]`` and one."""

    obs: np.ndarray
    act: np.ndarray
    ins: int


class Scorer:
    """Scores with fixed weights; compiled functions are made once per instance.

    Args:
        config: Sizes.
        params: Parameters, as from :func:`jaxguard.world_model.params.unflatten`.
    """

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        # Measured in bench/test_live_step.py: with the weights closed over as constants a call dispatches 3 arrays
        # instead of 60; `nnx.jit` on the module is an order of magnitude slower.
        weights = jax.device_get(jax.jit(lambda p: step_weights(build(config, p), config))(params))

        def pack(h: jax.Array, pool: Pool) -> jax.Array:
            return jnp.concatenate([h, pool.steps[:, None], pool.total[:, None], pool.top], axis=1)

        # A pooled head without a share, a kernel of zeros, sees nothing and costs nothing.
        seen_dim = config.embed_dim if np.any(params["pooled_head"]["kernel"]) else 0
        if not seen_dim:
            nothing = pooled_weights(jnp.zeros((0, 1)), weights.pooled.bias[None])
            weights = weights._replace(pooled=nothing)

        def look(w: StepWeights, obs: jax.Array, act: jax.Array) -> PoolInputs:
            return pool_inputs(w.pooled, obs[..., :seen_dim], act[..., :seen_dim])

        @jax.jit
        def start(ins: jax.Array) -> LiveState:
            w = constants()
            instruction, pooled_e = encode_instruction(w, ins), pool_instruction(w.pooled, ins[:, :seen_dim])
            given = jnp.concatenate([instruction.heads_e, pooled_e.weigh, pooled_e.alone[:, None]], axis=1)
            return LiveState(pack(instruction.h0, empty_pool(1, seen_dim)), given)

        @jax.jit
        def live(state: LiveState, x: jax.Array) -> tuple[LiveState, jax.Array]:
            w = constants()
            step, seen = encode_steps(w, config, x[:1], x[1:]), look(w, x[:1], x[1:])
            deter, heads = config.deter, 2 * config.hidden
            h, _ = observe_step(w, config, state.carry[:, :deter], step)
            pool = Pool(state.carry[:, deter], state.carry[:, deter + 1], state.carry[:, deter + 2 :])
            pool, pooled = pool_step(w.pooled, pool, seen)
            pooled = pooled_logit(pooled, seen, PooledInstruction(state.given[:, heads:-1], state.given[:, -1]))
            risks = read_mode(w, config, h, step.heads_a, state.given[:, :heads], pooled)
            return state._replace(carry=pack(h, pool)), risks[0]

        @jax.jit
        def chunk(
            carry: Carry, obs: jax.Array, act: jax.Array, ins: jax.Array, which: jax.Array, is_first: jax.Array
        ) -> tuple[Carry, jax.Array]:
            w = constants()
            instruction, pooled_e = encode_instruction(w, ins), pool_instruction(w.pooled, ins[:, :seen_dim])
            x, seen = encode_steps(w, config, obs, act), look(w, obs, act)
            unseen = empty_pool(LANES, seen_dim)

            def body(
                carry: Carry, inputs: tuple[StepInputs, PoolInputs, jax.Array, jax.Array]
            ) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
                step, own, index, first = inputs

                def fresh(start: jax.Array, running: jax.Array) -> jax.Array:
                    return jnp.where(first[:, None] if running.ndim == 2 else first, start, running)

                h, pool = jax.tree.map(fresh, (instruction.h0[index], unseen), carry)
                h, _ = observe_step(w, config, h, step)
                pool, pooled = pool_step(w.pooled, pool, own)
                return (h, pool), (h, pooled)

            last, (hs, pooled) = jax.lax.scan(body, carry, (x, seen, which, is_first))
            pooled = pooled_logit(pooled, seen, jax.tree.map(lambda v: v[which], pooled_e))
            return last, read_mode(w, config, hs, x.heads_a, instruction.heads_e[which], pooled)

        def constants() -> StepWeights:
            return jax.tree.map(jnp.asarray, weights)

        self._start, self._live, self._chunk, self._seen_dim = start, live, chunk, seen_dim

    def start(self, instruction: np.ndarray) -> LiveState:
        """State before the first step of a trajectory with this instruction vector ``[E]``."""
        return self._start(_vectors("instruction", instruction, (self.config.embed_dim,))[None])

    def step(self, state: LiveState, obs: np.ndarray, act: np.ndarray) -> tuple[LiveState, float, float]:
        """Scores one proposed action, ``obs`` and ``act`` being ``[E]``.

        Returns:
            The state if the action is executed, its hazard risk and its prefix risk. ``state`` itself is
            unchanged and can be used again.
        """
        shape = (self.config.embed_dim,)
        x = np.stack([_vectors("observation", obs, shape), _vectors("action", act, shape)])
        after, risks = self._live(state, x)
        hazard, prefix = np.asarray(risks)
        return after, float(hazard), float(prefix)

    def score(self, sequences: Iterable[Sequence], gather: Gather) -> Iterator[tuple[int, np.ndarray]]:
        """Risks of many trajectories, each as soon as it is done.

        Args:
            sequences: Read lazily: at most a few per lane are held.
            gather: Row ids ``[...]`` to vectors ``[..., E]``, e.g. ``FeatureStore.gather``.

        Raises:
            JaxguardError: a trajectory has not as many observations as actions.

        Yields:
            Position of the trajectory in ``sequences``, and its risks ``[T, 2]`` (hazard, prefix; float32).
        """
        packer = _Packer(sequences)
        carry = (jnp.zeros((LANES, self.config.deter)), empty_pool(LANES, self._seen_dim))
        waiting: tuple[list[_Piece], jax.Array] | None = None
        while True:
            block = packer.next_block()
            if block is not None:
                ins = np.zeros((INSTRUCTIONS, self.config.embed_dim), np.float32)
                ins[: len(block.instructions)] = gather(np.array(block.instructions, np.int64))
                vectors = gather(block.obs), gather(block.act)
                carry, risks = self._chunk(carry, *vectors, ins, block.which, block.is_first)
            if waiting is not None:  # one call behind: the host packs and gathers while the device computes
                yield from packer.collect(waiting[0], np.asarray(waiting[1]))
            if block is None:
                break
            waiting = (block.pieces, risks)
        yield from packer.empty


def _vectors(name: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if value.shape != shape:
        raise JaxguardError(f"{name}: got a vector of shape {value.shape}, expected {shape}")
    return value.astype(np.float32, copy=False)


@dataclass
class _Running:
    """A trajectory in a lane: how far it was packed and collected."""

    position: int
    sequence: Sequence
    packed: int
    collected: int
    risks: np.ndarray


class _Piece(NamedTuple):
    """Steps ``start .. start + size`` of a block's lane belong to ``run``."""

    run: _Running
    lane: int
    start: int
    size: int


class _Block(NamedTuple):
    obs: np.ndarray  # [CHUNK, LANES] row ids
    act: np.ndarray  # [CHUNK, LANES]
    instructions: list[int]  # row ids
    which: np.ndarray  # [CHUNK, LANES] index into instructions
    is_first: np.ndarray  # [CHUNK, LANES] bool
    pieces: list[_Piece]


class _Packer:
    """Fills lanes from a stream of sequences, block after block."""

    def __init__(self, sequences: Iterable[Sequence]):
        self._stream = enumerate(sequences)
        self._lanes: list[_Running | None] = [None] * LANES
        self.empty: list[tuple[int, np.ndarray]] = []  # trajectories without steps

    def _take(self) -> _Running | None:
        for position, sequence in self._stream:
            if len(sequence.obs) != len(sequence.act):
                raise JaxguardError(
                    f"trajectory {position}: got {len(sequence.obs)} observations and {len(sequence.act)} actions, "
                    "expected one of each for every step"
                )
            if len(sequence.act):
                return _Running(position, sequence, 0, 0, np.empty((len(sequence.act), 2), np.float32))
            self.empty.append((position, np.empty((0, 2), np.float32)))
        return None

    def next_block(self) -> _Block | None:
        """The next steps of all lanes; None when nothing is left."""
        obs, act, which = (np.zeros((CHUNK, LANES), np.int64) for _ in range(3))
        is_first = np.zeros((CHUNK, LANES), bool)
        instructions: list[int] = []
        pieces: list[_Piece] = []
        for lane in range(LANES):
            at = 0
            while at < CHUNK and len(instructions) < INSTRUCTIONS - (LANES - lane - 1):
                run = self._lanes[lane] or self._take()
                if run is None:
                    break
                size = min(CHUNK - at, len(run.sequence.act) - run.packed)
                part = slice(run.packed, run.packed + size)
                obs[at : at + size, lane] = run.sequence.obs[part]
                act[at : at + size, lane] = run.sequence.act[part]
                which[at : at + size, lane] = len(instructions)
                is_first[at, lane] = run.packed == 0
                instructions.append(run.sequence.ins)
                pieces.append(_Piece(run, lane, at, size))
                run.packed += size
                at += size
                self._lanes[lane] = run if run.packed < len(run.sequence.act) else None
        return _Block(obs, act, instructions, which, is_first, pieces) if pieces else None

    def collect(self, pieces: list[_Piece], risks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Stores a block's risks ``[CHUNK, LANES, 2]`` and yields the trajectories it completed."""
        for run, lane, start, size in pieces:
            run.risks[run.collected : run.collected + size] = risks[start : start + size, lane]
            run.collected += size
            if run.collected == len(run.risks):
                yield run.position, run.risks
        yield from self.empty
        self.empty = []
