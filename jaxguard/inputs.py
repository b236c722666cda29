"""What a run reads: the configuration and split in its folder, trajectories, and features.

Opening is in two steps, so that whatever stops a run stops it before there is a folder: :func:`prepare` reads
everything into memory, :func:`establish` writes ``config.yaml`` and ``splits.json`` where they are missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from jaxguard.config import Config
from jaxguard.features.encoder import Encoder, load_encoder
from jaxguard.features.store import FeatureStore
from jaxguard.route_config import RouteConfig, RoutingConfig
from jaxguard.settings import ConfigError, dump_settings, load_settings
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.splits import load_splits, make_splits, save_splits, transfer_splits
from jaxguard.training.episodes import Episodes, make_episodes
from jaxguard.types import JaxguardError, Trajectory
from jaxguard.writing import write_whole

PARTS = ("train", "validation", "calibration", "test")
UNSEEN = "unseen"
"""Part of a router's split that holds what ``routing.unseen`` names."""
CONFIG_FILE, SPLITS_FILE = "config.yaml", "splits.json"
WRITTEN = ("guard", "router", "report", "rivals", "route", "stage2", "stage1", SPLITS_FILE, CONFIG_FILE)
"""All names that a run writes into its folder; what makes it a run folder is deleted last."""


_TRAIN = {"guard": "jaxguard train", "router": "jaxguard route train"}

C = TypeVar("C", Config, RouteConfig)


class RunError(JaxguardError):
    """A run folder lacks what a step needs."""


@dataclass(frozen=True)
class Run(Generic[C]):
    """An opened run folder with its trajectories.

    Attributes:
        config: A guard's experiment, or a router's.
        divided: The split as the folder holds it: ``splits`` without ``data.train_only``.
        digests: Of the split and of each data path's ids and labels, by name: what a guard was trained on.
    """

    folder: Path
    config: C
    trajectories: Mapping[str, Trajectory]
    splits: Mapping[str, Sequence[str]]
    encoder: Encoder
    store: FeatureStore
    digests: Mapping[str, str]
    divided: Mapping[str, list[str]]

    def part(self, name: str) -> list[Trajectory]:
        """Trajectories of a part of the split."""
        return [self.trajectories[i] for i in self.splits[name]]


def run_episodes(run: Run[Config], name: str, *, whole: bool = False) -> Episodes:
    """A part of a guard's split as rows of the feature table, cut to ``train.max_steps`` unless ``whole``."""
    config, part = run.config, run.part(name)
    return make_episodes(
        part,
        run.store,
        max_steps=max(map(len, part), default=0) if whole else config.train.max_steps,
        unlabelled_hazard=config.stage2.unlabelled_hazard,
        thought=config.data.thought,
        grounded=config.model.grounded,
        part=name,
    )


def load_trajectories(paths: Iterable[str]) -> dict[str, Trajectory]:
    """Trajectories of converted files and folders by id.

    Raises:
        RunError: no path, no trajectory, or an id in two of them.
    """
    return {t.id: t for found in _by_path(paths).values() for t in found}


def _by_path(paths: Iterable[str]) -> dict[str, list[Trajectory]]:
    found: dict[str, list[Trajectory]] = {}
    seen: set[str] = set()
    for path in paths:
        if not Path(path).exists():
            raise RunError(f"data.trajectories: {path} does not exist; was it moved, or named from another folder?")
        found.setdefault(path, [])
        for trajectory in read_trajectories(Path(path)):
            if trajectory.id in seen:
                raise RunError(f"data.trajectories {path}: id {trajectory.id!r} occurs twice, expected unique ids")
            seen.add(trajectory.id)
            found[path].append(trajectory)
    if not found:
        raise RunError("data.trajectories: got no path, expected folders that `jaxguard convert` or `generate` wrote")
    if not seen:
        raise RunError(f"data.trajectories: no trajectory in {', '.join(found)}")
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digests_of(splits: Mapping[str, Sequence[str]], by_path: Mapping[str, Iterable[Trajectory]]) -> dict[str, str]:
    """Of a split and of each data path's ids and labels: what the bundle of a guard says that it was trained on.

    ``splits`` are as in the run's folder: without ``data.train_only``.
    """
    found = {path: _digest([_identity(trajectory) for trajectory in own]) for path, own in by_path.items()}
    return {SPLITS_FILE: _digest(splits), **found}


def _identity(trajectory: Trajectory) -> tuple[Any, ...]:
    """What a guard or a router is trained on, beside texts."""
    reviewed = [trajectory.metadata[name] for name in ("reviews", "memory") if name in trajectory.metadata]
    t = trajectory
    return (t.id, len(t), t.unsafe, t.first_hazard, t.timing, *reviewed)


def prepare(folder: Path, config: C | None = None, *, fresh: bool = False, kind: type[C] = Config) -> Run[C]:  # type: ignore[assignment]
    """Reads what a run needs and checks that it fits together; writes nothing.

    Args:
        folder: The run folder; need not exist with ``config``.
        config: The experiment; without one, ``config.yaml`` in the folder.
        fresh: Passes over what an earlier run left in the folder.
        kind: What its ``config.yaml`` describes.

    Raises:
        RunError: not a run folder, made with another configuration, or data that are not there.
        JaxguardError: store, encoder, model or split do not fit.
    """
    stored = folder / CONFIG_FILE
    read: C
    if config is not None:
        read = config
        if stored.exists() and not fresh and (differing := _differing(_stored(stored, kind), config)):
            raise RunError(
                f"run folder {folder}: was made with another configuration ({', '.join(differing)}); "
                "use another --out, or --fresh"
            )
    elif stored.exists():
        read = _stored(stored, kind)
    else:
        raise RunError(
            f"run folder {folder}: no config.yaml there; expected a folder that `{_TRAIN[_name(kind)]}` wrote"
        )
    by_path = _by_path((*read.data.trajectories, *read.data.train_only, *read.data.unseen))
    trajectories = {t.id: t for found in by_path.values() for t in found}
    only = {
        name: {t.id: t for path in getattr(read.data, name) for t in by_path[path]} for name in ("train_only", "unseen")
    }
    for name, some in only.items():
        if (paths := getattr(read.data, name)) and not some:
            raise RunError(f"data.{name}: no trajectory in {', '.join(paths)}")
    more: dict[str, Trajectory] = only["train_only"]
    encoder = load_encoder(read.encoder)
    store = _store(read, encoder)
    divided = {i: t for i, t in trajectories.items() if i not in more}
    own: dict[str, list[str]] = _splits(read, divided, only["unseen"], None if fresh else folder / SPLITS_FILE)
    splits = {**own, PARTS[0]: [*own[PARTS[0]], *sorted(more)]}
    _refuse_shared_groups(splits, trajectories, more)
    return Run(folder, read, trajectories, splits, encoder, store, digests_of(own, by_path), own)


def _name(kind: type[Any]) -> str:
    """What a run makes; its bundle's folder is called like it."""
    return "guard" if issubclass(kind, Config) else "router"


def _stored(file: Path, kind: type[C]) -> C:
    try:
        return load_settings(file, (), kind)
    except ConfigError as error:
        raise RunError(f"{error}; expected the settings that `{_TRAIN[_name(kind)]}` wrote") from error


def establish(run: Run[Any]) -> None:
    """Writes the folder of a prepared run; what is there stays."""
    run.folder.mkdir(parents=True, exist_ok=True)
    file, split = run.folder / SPLITS_FILE, run.config.data.split
    if not file.exists():
        if split.file:  # copied: the run must not depend on a file elsewhere
            write_whole(file, Path(split.file).read_text(encoding="utf-8"))
        else:
            save_splits(
                file, run.divided, seed=split.seed, group_by=_group_by(run.config), join_actions=split.join_actions
            )
    if not (run.folder / CONFIG_FILE).exists():
        dump_settings(run.config, run.folder / CONFIG_FILE)


def open_run(folder: Path, config: C | None = None, kind: type[C] = Config) -> Run[C]:  # type: ignore[assignment]
    """Opens a run folder; ``config`` makes a new one, otherwise ``config.yaml`` there is read.

    Raises:
        JaxguardError: as :func:`prepare`.
    """
    run = prepare(folder, config, kind=kind)
    establish(run)
    return run


_TRAINED_WITH = ("data.thought", "model.", "stage1.", "stage2.", "route.", "train.")
"""Settings that weights hang on; paths may move, and thresholds are set anew by others."""


class _Bundle(Protocol):
    @property
    def config(self) -> Config | RouteConfig: ...
    @property
    def provenance(self) -> Mapping[str, Any]: ...


def require_trained_on(run: Run[Any], bundle: _Bundle) -> None:
    """Refuses split, labels or settings other than those that a guard or router was trained on.

    Its level would hold for none of them.

    Args:
        run: The run as it is now.
        bundle: That in its folder.

    Raises:
        RunError: names the files or settings that differ.
    """
    trained, name = bundle.provenance.get("inputs"), _name(type(run.config))
    differing = [key for key in _differing(bundle.config, run.config) if key.startswith(_TRAINED_WITH)]
    if differing:
        raise RunError(
            f"{run.folder / CONFIG_FILE}: has other settings than the {name} in {run.folder} was trained with "
            f"({', '.join(differing)}); restore that, or run `{_TRAIN[name]}` again"
        )
    if not isinstance(trained, dict):
        raise RunError(f"{name} bundle {run.folder / name}: does not say what it was trained on; run `{_TRAIN[name]}`")
    files = [file for file in {**trained, **run.digests} if trained.get(file) != run.digests.get(file)]
    if files:
        shown = ", ".join(str(run.folder / file) if file == SPLITS_FILE else file for file in files)
        raise RunError(
            f"{shown}: not what the {name} in {run.folder} was trained on (other ids, labels or parts); restore that, "
            f"or run `{_TRAIN[name]}` again"
        )


def require_replaceable(folder: Path, config: Config | RouteConfig) -> None:
    """Refuses to delete anything but an earlier run, and a run that holds what the new one reads.

    Raises:
        RunError: says why nothing was deleted.
    """
    refusal = f"--fresh: {folder} is not a run folder, nothing was deleted"
    if not (folder / CONFIG_FILE).exists() or not any((folder / name).exists() for name in (SPLITS_FILE, "stage1")):
        raise RunError(f"{refusal}; expected config.yaml and splits.json there")
    try:
        load_settings(folder / CONFIG_FILE, (), type(config))
    except ConfigError as error:
        raise RunError(f"{refusal}: {error}") from error
    data = config.data
    inputs = {
        "data.trajectories": data.trajectories,
        "data.train_only": data.train_only,
        "data.unseen": data.unseen,
        "data.store": (data.store,) if data.store else (),
        "data.split.file": (data.split.file,) if data.split.file else (),
        "encoder.path": (config.encoder.path,) if config.encoder.path else (),
    }
    for key, paths in inputs.items():
        for path in paths:
            if Path(path).resolve().is_relative_to(folder.resolve()):
                raise RunError(f"--fresh: {key} is {path}, inside of {folder}; nothing was deleted, use another --out")


def delete_run(folder: Path) -> None:
    """Deletes what a run wrote into its folder and leaves everything else alone."""
    for name in WRITTEN:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _store(config: Config | RouteConfig, encoder: Encoder) -> FeatureStore:
    if not config.data.store:
        raise RunError("data.store: got no path, expected the feature store that `jaxguard embed` wrote")
    if config.model.embed_dim != encoder.dim:
        raise RunError(
            f"model.embed_dim: got {config.model.embed_dim}, expected {encoder.dim}, the values per text of "
            f"{encoder.fingerprint}"
        )
    return FeatureStore.open(config.data.store, encoder.fingerprint, encoder.dim)


def _group_by(config: Config | RouteConfig) -> str | None:
    return None if config.data.split.group_by == "group" else config.data.split.group_by


def _splits(
    config: Config | RouteConfig,
    trajectories: Mapping[str, Trajectory],
    unseen: Mapping[str, Trajectory],
    file: Path | None,
) -> dict[str, list[str]]:
    """The split of this run: the one in its folder, the one that the config names, or a new one."""
    split = config.data.split
    named = Path(split.file) if split.file else None
    held_out = hold_out(config.routing, trajectories) if isinstance(config, RouteConfig) else {}
    for path in (file, named):
        if path is not None and path.exists():
            found = load_splits(path, trajectories)
            if missing := [name for name in PARTS if name not in found]:
                raise RunError(f"{path}: lacks {', '.join(missing)}, expected the parts {', '.join(PARTS)}")
            for name in PARTS[:3]:
                if wrong := [i for i in found[name] if i in held_out]:
                    raise RunError(
                        f"{path}: {name} holds {wrong[0]!r}, which routing.unseen holds out ({held_out[wrong[0]][0]}), "
                        "expected it in no part but test"
                    )
            return found
    if named is not None:
        raise RunError(f"data.split.file: {named} does not exist")
    fractions = {name: getattr(split, name) for name in PARTS}
    options: dict[str, Any] = {"group_by": _group_by(config), "join_actions": split.join_actions}
    seen, other = ([t for i, t in some.items() if i not in held_out] for some in (trajectories, unseen))
    if unseen:
        seen = [t for t in seen if t.id not in unseen]
        splits = transfer_splits(seen, other, fractions, split.seed, split.local, **options)
    else:
        splits = make_splits(seen, fractions, split.seed, **options)
    return {**splits, UNSEEN: sorted(held_out)} if held_out else splits


def _refuse_shared_groups(
    splits: Mapping[str, Sequence[str]], trajectories: Mapping[str, Trajectory], more: Mapping[str, Trajectory]
) -> None:
    """Raises a RunError where a group of ``data.train_only`` stands in another part than training."""
    groups = {t.group for t in more.values() if t.group}
    for name, ids in splits.items():
        if name != PARTS[0] and (shared := [i for i in ids if trajectories[i].group in groups]):
            raise RunError(
                f"data.train_only: its group {trajectories[shared[0]].group!r} is also that of {shared[0]!r} in the "
                f"{name} part, expected groups of its own"
            )


def hold_out(settings: RoutingConfig, trajectories: Mapping[str, Trajectory]) -> dict[str, list[str]]:
    """The entries of ``routing.unseen`` by the id of each trajectory that falls under one.

    Raises:
        RunError: no trajectory falls under an entry.
    """
    found = {i: entries for i, t in trajectories.items() if (entries := settings.held_out(t.metadata))}
    met = {entry for entries in found.values() for entry in entries}
    if strange := [entry for entry in settings.unseen if entry not in met]:
        raise RunError(f"routing.unseen: got {strange[0]!r}, which no trajectory has in its metadata")
    return found


def _differing(one: Any, other: Any, prefix: str = "") -> list[str]:
    """Dotted keys in which two configurations differ."""
    if not dataclasses.is_dataclass(one):
        return [] if one == other else [prefix.rstrip(".")]
    return [
        key
        for field in dataclasses.fields(one)
        for key in _differing(getattr(one, field.name), getattr(other, field.name), f"{prefix}{field.name}.")
    ]


def even_sources(trajectories: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """As many trajectories of every source as of the rarest one, drawn by ``seed``; their order stays."""
    places: dict[str, list[int]] = {}
    for place, trajectory in enumerate(trajectories):
        places.setdefault(trajectory.source, []).append(place)
    count = min(map(len, places.values()), default=0)
    kept = [i for name, own in places.items() for i in random.Random(f"{seed}:{name}").sample(own, count)]
    return [trajectories[i] for i in sorted(kept)]
