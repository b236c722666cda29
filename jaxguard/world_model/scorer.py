"""Deterministic scoring with fixed weights: one live step, and many trajectories packed into lanes.

In archives the same texts come again and again. What a step reads of a text does not depend on the step, so
:meth:`Scorer.score` encodes a text once and keeps it, in tables of a fixed size, for the steps that need it.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxguard.config import PRECISIONS, ModelConfig
from jaxguard.types import JaxguardError
from jaxguard.world_model.packing import LANES, Packer, Piece, Sequence, gather_pairs
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.pooling import (
    Pool,
    PooledInstruction,
    empty_pool,
    pool_actions,
    pool_inputs,
    pool_instruction,
    pool_observations,
    pool_step,
    pooled_logit,
    pooled_weights,
)
from jaxguard.world_model.rssm import (
    StepWeights,
    encode_actions,
    encode_instruction,
    encode_observations,
    observe_step,
    read_mode,
    rounded,
    step_inputs,
    step_weights,
)

Gather = Callable[[np.ndarray], np.ndarray]
Encode = Callable[[StepWeights, jax.Array], jax.Array]
Arrays = TypeVar("Arrays")
Carry = tuple[jax.Array, Pool]
"""``h`` ``[B, D]`` and what the runs have shown."""
Read = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]
"""Where risk is read: a state, its latent (None: the prior's mode there), the heads' other terms, the pooled head's."""

KEPT = 8_192
"""Encoded texts that a table holds. With 4,000 to 16,000 nearly all repeats of real sets are found; every call of
:meth:`Scorer.score` clears that much memory first."""
BATCHES = (256, 256, 64)
"""Observations, actions and instructions encoded at once. One number each: bits differ between batch sizes."""


class LiveState(NamedTuple):
    """What B sessions carry between steps, on the device; packed, because every array costs a call some time."""

    carry: jax.Array  # [B, D + 2 + E + A]: h, and the pool (steps, total, top); without a pooled head, E and A are 0
    given: jax.Array  # [B, 2H + E + A + 1]: what the instruction is to the heads and to the pooled head (weigh, alone)


class Scorer:
    """Scores with fixed weights; compiled functions are made once per instance.

    Args:
        config: Sizes.
        params: Parameters, as from :func:`jaxguard.world_model.params.unflatten`.
        devices: What :meth:`score` shares its lanes out to; by default all local ones where they are accelerators,
            and one where they are CPUs, whose threads share one device's work already. A risk has the same bits on
            any number of equal devices.
        precision: Of the factors of products where several trajectories or sessions move on together, one of
            :data:`jaxguard.config.PRECISIONS`; sums, and all of a single live step, are float32. "bfloat16" doubles the
            rate on processors with AMX and is of no use without.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        devices: abc.Sequence[jax.Device] | None = None,
        precision: str = PRECISIONS[0],
    ):
        self.config = config
        if devices is None:
            devices = jax.local_devices() if jax.default_backend() != "cpu" else ()
        self._mesh = Mesh(np.array(devices), ("lanes",)) if len(devices) > 1 else None
        # Measured in bench/test_single_stream.py: with the weights closed over as constants a call dispatches 3 arrays
        # instead of 60; `nnx.jit` on the module is an order of magnitude slower.
        weights = jax.device_get(jax.jit(lambda p: step_weights(build(config, p), config))(params))
        # A pooled head without a share, a kernel of zeros, sees nothing and costs nothing.
        seen_obs, seen_act = (config.embed_dim, config.act_dim) if np.any(params["pooled_head"]["kernel"]) else (0, 0)
        seen_dim = seen_obs + seen_act
        if not seen_dim:
            nothing = pooled_weights(jnp.zeros((0, 1)), weights.pooled.bias[None], 0)
            weights = weights._replace(pooled=nothing)
        many = weights if precision == PRECISIONS[0] else rounded(weights, config, precision)
        deter, width = config.deter, config.hidden

        def constants(batch: int = 0) -> StepWeights:
            return jax.tree.map(jnp.asarray, weights if batch == 1 else many)

        def observation(w: StepWeights, obs: jax.Array) -> jax.Array:
            return jnp.concatenate(
                [encode_observations(w, obs), pool_observations(w.pooled, obs[:, :seen_obs])], axis=1
            )

        def action(w: StepWeights, act: jax.Array) -> jax.Array:
            return jnp.concatenate([encode_actions(w, act), pool_actions(w.pooled, act[:, :seen_act])], axis=1)

        def instruction(w: StepWeights, ins: jax.Array) -> jax.Array:
            e, pooled = encode_instruction(w, ins), pool_instruction(w.pooled, ins[:, :seen_obs])
            return jnp.concatenate([e.h0, e.heads_e, pooled.weigh, pooled.alone[:, None]], axis=1)

        def step(w: StepWeights, carry: Carry, obs: jax.Array, act: jax.Array, given: jax.Array) -> tuple[Carry, Read]:
            """Moves on; says what :func:`read_mode` is to read."""
            h, pool = carry
            obs_ends, act_ends = -seen_obs - 2, -seen_act - 2
            x = step_inputs(config, obs[:, :obs_ends], act[:, :act_ends])
            after, (_, z) = observe_step(w, config, h, x)
            own = pool_inputs(w.pooled, obs[:, obs_ends:], act[:, act_ends:])
            pool, pooled = pool_step(w.pooled, pool, own)
            pooled = pooled_logit(pooled, own, PooledInstruction(given[:, 2 * width : -1], given[:, -1]))
            state = (after, None) if config.successor else (h, z)
            return (after if config.recurrent else h, pool), (*state, x.heads_a + given[:, : 2 * width], pooled)

        def pack(h: jax.Array, pool: Pool) -> jax.Array:
            return jnp.concatenate([h, pool.steps[:, None], pool.total[:, None], pool.top], axis=1)

        @jax.jit
        def start(ins: jax.Array) -> LiveState:
            known = instruction(constants(len(ins)), ins)
            return LiveState(pack(known[:, :deter], empty_pool(len(ins), seen_dim)), known[:, deter:])

        @jax.jit
        def live(state: LiveState, x: jax.Array) -> tuple[LiveState, jax.Array]:
            w, carry = constants(len(state.carry)), state.carry
            pool = Pool(carry[:, deter], carry[:, deter + 1], carry[:, deter + 2 :])
            act = jnp.concatenate(list(x[1:]), axis=-1)
            after, read = step(w, (carry[:, :deter], pool), observation(w, x[0]), action(w, act), state.given)
            return state._replace(carry=pack(*after)), read_mode(w, config, *read)

        def chunk(
            carry: Carry, tables: tuple[jax.Array, ...], rows: tuple[jax.Array, ...], is_first: jax.Array
        ) -> tuple[Carry, jax.Array]:
            w, unseen = constants(), empty_pool(len(carry[0]), seen_dim)

            def body(carry: Carry, at: tuple[tuple[jax.Array, ...], jax.Array]) -> tuple[Carry, Read]:
                obs, act, known = (table[own] for table, own in zip(tables, at[0], strict=True))

                def fresh(start: jax.Array, running: jax.Array) -> jax.Array:
                    return jnp.where(at[1][:, None] if running.ndim == 2 else at[1], start, running)

                carry = jax.tree.map(fresh, (known[:, :deter], unseen), carry)
                return step(w, carry, obs, act, known[:, deter:])

            last, read = jax.lax.scan(body, carry, (rows, is_first))
            return last, read_mode(w, config, *read)

        if self._mesh is not None:
            # Mapped rather than left to the partitioner: each device runs the program that one alone would.
            across = PartitionSpec(None, "lanes")
            chunk = jax.shard_map(
                chunk,
                mesh=self._mesh,
                in_specs=(PartitionSpec("lanes"), PartitionSpec(), across, across),
                out_specs=(PartitionSpec("lanes"), across),
            )
        self._dims = (config.embed_dim, config.act_dim, config.embed_dim)
        self._start, self._live, self._chunk, self._seen_dim = start, live, jax.jit(chunk), seen_dim
        self._kinds = tuple(
            _Kind(
                _table_writer(constants, encode),
                jax.eval_shape(encode, weights, jnp.zeros((1, dim))).shape[1],
                batch,
                dim,
            )
            for encode, batch, dim in zip((observation, action, instruction), BATCHES, self._dims, strict=True)
        )

    def start(self, instruction: np.ndarray) -> LiveState:
        """State before the first step of a trajectory with this instruction vector ``[E]``."""
        return self._start(_vectors("instruction", instruction, (self.config.embed_dim,))[None])

    def step(self, state: LiveState, obs: np.ndarray, act: np.ndarray) -> tuple[LiveState, float, float]:
        """Scores one proposed action, ``obs`` being ``[E]`` and ``act`` ``[A]``.

        Returns:
            The state if the action is executed, its hazard risk and its prefix risk. ``state`` itself is
            unchanged and can be used again.
        """
        own = _vectors("observation", obs, self._dims[:1]), _vectors("action", act, self._dims[1:2])
        # One array, [1 + A / E, 1, E]: every one costs a call some time.
        after, risks = self._live(state, np.concatenate(own).reshape(-1, 1, self._dims[0]))
        hazard, prefix = np.asarray(risks)[0]
        return after, float(hazard), float(prefix)

    def start_many(self, instructions: np.ndarray) -> LiveState:
        """States of B sessions that move on together, with instructions ``[B, E]``."""
        return self._start(_vectors("instructions", instructions, (len(instructions), self.config.embed_dim)))

    def step_many(self, state: LiveState, obs: np.ndarray, act: np.ndarray) -> tuple[LiveState, np.ndarray]:
        """As :meth:`step` for B sessions: ``obs`` is ``[B, E]``, ``act`` ``[B, A]``, risks ``[B, 2]`` (hazard, prefix).

        Every B is compiled once. Bits of a session's risks may differ from those of :meth:`step`, which is float32
        whatever the scorer's precision.
        """
        batch = len(state.carry)
        own = _vectors("observations", obs, (batch, self._dims[0])), _vectors("actions", act, (batch, self._dims[1]))
        x = np.concatenate(own, axis=1).reshape(batch, -1, self._dims[0])
        after, risks = self._live(state, np.ascontiguousarray(x.swapaxes(0, 1)))
        return after, np.asarray(risks)

    def score(
        self, sequences: Iterable[Sequence], gather: Gather, lanes: int = LANES
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Risks of many trajectories, each as soon as it is done.

        Args:
            sequences: Read lazily: at most a few per lane are held.
            gather: Row ids ``[...]`` to vectors ``[..., E]``, e.g. ``FeatureStore.gather``.
            lanes: Trajectories that are scored side by side on each device; every number is compiled once.

        Raises:
            JaxguardError: a trajectory has not as many observations as actions.

        Yields:
            Position of the trajectory in ``sequences``, and its risks ``[T, 2]`` (hazard, prefix; float32).
        """
        lanes *= 1 if self._mesh is None else self._mesh.size
        packer = Packer(sequences, lanes)
        carry = self._placed((jnp.zeros((lanes, self.config.deter)), empty_pool(lanes, self._seen_dim)), "lanes")
        tables = [
            _Table(kind, self._placed(jnp.zeros((KEPT + kind.batch, kind.width))), own)
            for kind, own in zip(
                self._kinds, (gather, gather_pairs(gather) if self.config.grounded else gather, gather), strict=True
            )
        ]
        waiting: tuple[list[Piece], jax.Array] | None = None
        while True:
            block = packer.next_block()
            if block is not None:
                ids = (block.obs, block.act, block.ins)
                rows = tuple(table.find(own) for table, own in zip(tables, ids, strict=True))
                carry, risks = self._chunk(carry, tuple(table.array for table in tables), rows, block.is_first)
            if waiting is not None:  # one call behind: the host packs and gathers while the device computes
                yield from packer.collect(waiting[0], np.asarray(waiting[1]))
            if block is None:
                break
            waiting = (block.pieces, risks)
        yield from packer.empty

    def _placed(self, arrays: Arrays, *axes: str) -> Arrays:
        """On all devices, shared out along the named axes."""
        if self._mesh is None:
            return arrays
        placed: Arrays = jax.device_put(arrays, NamedSharding(self._mesh, PartitionSpec(*axes)))
        return placed


def _vectors(name: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if value.shape != shape:
        raise JaxguardError(f"{name}: got a vector of shape {value.shape}, expected {shape}")
    return value.astype(np.float32, copy=False)


class _Kind(NamedTuple):
    """How one kind of text is encoded."""

    write: Callable[..., jax.Array]  # table, vectors [batch, E], first row -> the table with their encodings
    width: int
    batch: int
    dim: int


def _table_writer(constants: Callable[[], StepWeights], encode: Encode) -> Callable[..., jax.Array]:
    def write(table: jax.Array, x: jax.Array, at: int) -> jax.Array:
        return jax.lax.dynamic_update_slice(table, encode(constants(), x), (at, 0))

    return jax.jit(write, donate_argnums=0)


class _Table:
    """Encoded vectors of one kind by row id; emptied when full."""

    def __init__(self, kind: _Kind, array: jax.Array, gather: Gather):
        self.array, self._kind, self._gather = array, kind, gather
        self._held: dict[int, int] = {}

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Where in ``array`` the rows of ``ids`` are, encoding those that are missing."""
        unique, inverse = np.unique(ids, return_inverse=True)
        wanted = unique.tolist()
        missing = [row for row in wanted if row not in self._held]
        if len(self._held) + len(missing) > KEPT:
            self._held, missing = {}, wanted
        batch = self._kind.batch
        for first in range(0, len(missing), batch):
            part = missing[first : first + batch]
            x = np.zeros((batch, self._kind.dim), np.float32)
            x[: len(part)] = self._gather(np.array(part, np.int64))
            self.array = self._kind.write(self.array, x, len(self._held))
            self._held.update(zip(part, range(len(self._held), len(self._held) + len(part)), strict=True))
        return np.array([self._held[row] for row in wanted], np.int32)[inverse].reshape(ids.shape)
