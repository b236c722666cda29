"""Orbax checkpoints: arrays, where the data stream stood, and what wrote them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxguard.training.episodes import TrainingError
from jaxguard.training.state import TrainState
from jaxguard.versions import versions


class Checkpoints:
    """The checkpoints of one stage in one folder; the newest two are kept, each with the best parameters so far.

    Args:
        folder: Created where missing.
        identity: What a checkpoint must agree with to be resumed (configuration, data, seed).
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self._identity = json.loads(json.dumps(identity))
        # Orbax insists on absolute paths.
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        )

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, best: Any, meta: dict[str, Any]) -> None:
        """Writes ``state``, the best parameters so far and ``meta``; returns when it is on disk.

        Raises:
            TrainingError: it cannot be written.
        """
        arrays = {"train": state._asdict(), "best": best}
        info = {**meta, "identity": self._identity, "versions": versions(), "digest": _digest(arrays)}
        step = int(state.step)
        try:
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(info))
            )
            self._manager.wait_until_finished()
        except Exception as error:  # Orbax raises bare Exceptions for what it cannot write
            reason = str(error).strip().partition("\n")[0][:500]
            raise TrainingError(
                f"{self._named(step)}: cannot be written ({reason}); is the disk full? Training goes on from the "
                "checkpoint before it"
            ) from error

    def restore(self, template: TrainState) -> tuple[TrainState, Any, dict[str, Any]]:
        """The newest checkpoint on the default device, wherever it was written.

        Args:
            template: A state of the same structure; gives shapes, dtypes and shardings.

        Raises:
            TrainingError: there is none, or it was written for another configuration or data, or is damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            raise TrainingError(f"checkpoints {self._manager.directory}: none found, expected at least one")
        meta = self._read(step, meta=ocp.args.JsonRestore())["meta"]
        self._check_meta(step, meta)
        found = meta["identity"]
        if found != self._identity:
            differing = [k for k in {**self._identity, **found} if found.get(k) != self._identity.get(k)]
            raise TrainingError(
                f"{self._named(step)}: was written for another {', '.join(differing)}; "
                "use another --out folder, or --fresh to start over"
            )
        # Explicit shardings: a checkpoint of another device kind names devices that do not exist here.
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=device),
            {"train": template._asdict(), "best": template.params},
        )
        arrays = self._read(step, state=ocp.args.StandardRestore(abstract))["state"]
        if _digest(arrays) != meta["digest"]:
            raise TrainingError(f"{self._named(step)}: is damaged, its arrays are not those that were written")
        # Orbax binds arrays to their device; free ones, as at a fresh start, meet the step that is already compiled.
        free = jax.tree.map(lambda v: jnp.array(np.asarray(v)), arrays)
        return TrainState(**free["train"]), free["best"], meta

    def _check_meta(self, step: int, meta: Any) -> None:
        """Everything that resuming reads is there and of its kind."""
        if not isinstance(meta, dict):
            raise TrainingError(f"{self._named(step)}: its metadata are {type(meta).__name__}, expected an object")
        if lacking := {"identity", "digest", "position", "best_loss"} - meta.keys():
            raise TrainingError(f"{self._named(step)}: its metadata lack {', '.join(sorted(lacking))}")
        position, best = meta["position"], meta["best_loss"]
        counts = list(position.values()) if isinstance(position, dict) and position.keys() == {"epoch", "batch"} else []
        if len(counts) != 2 or any(type(count) is not int or count < 0 for count in counts):
            raise TrainingError(f"{self._named(step)}: position is {position!r:.80}, expected an epoch and a batch")
        if not (best is None or type(best) in (int, float)) or not isinstance(meta["identity"], dict):
            raise TrainingError(
                f"{self._named(step)}: best_loss is {best!r:.80} and identity {meta['identity']!r:.80}, expected a "
                "number or null and an object"
            )

    def _named(self, step: int) -> str:
        return f"checkpoint {self._manager.directory}/{step}"

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises bare Exceptions for arrays that it cannot decode
            reason = str(error).strip().partition("\n")[0][:500]
            raise TrainingError(f"{self._named(step)}: cannot be read: {reason}") from error

    def close(self) -> None:
        """Releases Orbax's threads."""
        self._manager.close()


def _digest(arrays: Any) -> str:
    """Hash of every array: large ones are stored without a checksum."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(arrays):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:16]
