"""Orbax checkpoints: arrays, where the data stream stood, and what wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import jaxguard
from jaxguard.training.episodes import TrainingError
from jaxguard.training.state import TrainState


def versions() -> dict[str, str]:
    """Versions of the libraries that decide numeric results."""
    import flax
    import numpy as np
    import optax

    return {
        "jaxguard": jaxguard.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "orbax": ocp.__version__,
        "numpy": np.__version__,
    }


class Checkpoints:
    """The checkpoints of one stage in one folder; the newest two and the best are kept.

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
        """Writes ``state``, the best parameters so far and ``meta``; returns when it is on disk."""
        info = {**meta, "identity": self._identity, "versions": versions()}
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave({"train": state._asdict(), "best": best}), meta=ocp.args.JsonSave(info)
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, template: TrainState) -> tuple[TrainState, Any, dict[str, Any]]:
        """The newest checkpoint on the default device, wherever it was written.

        Args:
            template: A state of the same structure; gives shapes, dtypes and shardings.

        Raises:
            TrainingError: written for another configuration or data, or not readable.
        """
        step = self._manager.latest_step()
        if step is None:
            raise TrainingError(f"checkpoints {self._manager.directory}: none found, expected at least one")
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        if meta["identity"] != self._identity:
            differing = [k for k in self._identity if meta["identity"].get(k) != self._identity[k]]
            raise TrainingError(
                f"checkpoint {self._manager.directory}/{step}: was written for another {', '.join(differing)}; "
                "use another --out folder, or --fresh to start over"
            )
        # Explicit shardings: a checkpoint of another device kind names devices that do not exist here.
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=device),
            {"train": template._asdict(), "best": template.params},
        )
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        except (ValueError, OSError, KeyError) as error:
            raise TrainingError(f"checkpoint {self._manager.directory}/{step}: cannot be read: {error}") from error
        train = restored.state["train"]
        return TrainState(**train), restored.state["best"], meta

    def close(self) -> None:
        """Releases Orbax's threads."""
        self._manager.close()
