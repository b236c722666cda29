"""What the experiments run: sets, seeds, variants. One YAML file; what a set is comes from its own configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from jaxguard.config import Config, load_config
from jaxguard.settings import ConfigError, load_settings, require, require_seed

DEFAULT = "default"
"""The variant that is a set's own configuration."""
FULL = "full"
"""The variant that an ablation is compared with."""


@dataclass(frozen=True)
class Plan:
    """Which runs there are.

    Attributes:
        configs: Folder with a configuration of each set, ``NAME.yaml``.
        generated: Sets that are made by the drift generator and embedded, in the output folder.
        sets: Sets on which the guard meets its rivals, once for each seed.
        ablated: Sets on which parts of the guard are taken away.
        seeds: Of split and training; the runs of a set differ in nothing else.
        ablation_seeds: The same for ablations.
        base: Overrides of all ablations: what every variant has in common with :data:`FULL`.
        ablations: ``"name: key=value"``: a variant and the one setting in which it differs.
        transfer: ``"one -> another"``: a set's guard, measured on another set.
        settings: Overrides of all runs.
    """

    configs: str = "configs"
    generated: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    ablated: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    ablation_seeds: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    ablations: tuple[str, ...] = ()
    transfer: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.sets), "sets", self.sets, "one set or more")
        for name in ("seeds", "ablation_seeds"):
            seeds = getattr(self, name)
            for seed in seeds:
                require(seed.isascii() and seed.isdigit(), name, seed, "whole numbers in quotes")
                require_seed(int(seed), name)
            require(len(set(map(int, seeds))) == len(seeds), name, seeds, "each seed once")
        for name in ("generated", "sets", "ablated", "transfer"):
            entries = getattr(self, name)
            require(len(set(entries)) == len(entries), name, entries, "each one once")
        require(bool(self.seeds), "seeds", self.seeds, "one seed or more")
        require(not self.ablated or bool(self.ablation_seeds), "ablation_seeds", self.ablation_seeds, "one or more")
        for entry in self.ablations:
            name, _, setting = entry.partition(": ")
            require("=" in setting and bool(name), "ablations", entry, "'name: key=value'")
            require(name not in (DEFAULT, FULL), "ablations", entry, f"a name other than {DEFAULT!r} and {FULL!r}")
        require(len(self.variants) == len(self.ablations) + 1, "ablations", self.ablations, "each name once")
        folders = [name.replace(" ", "_").replace("/", "-") for name in self.variants]
        require(len(set(folders)) == len(folders), "ablations", self.ablations, "names that differ in more than spaces")
        for entry in self.transfer:
            require(len(entry.split(" -> ")) == 2, "transfer", entry, "'one set -> another'")

    @property
    def variants(self) -> dict[str, tuple[str, ...]]:
        """Overrides by variant, :data:`FULL` first."""
        parted = (entry.partition(": ") for entry in self.ablations)
        return {FULL: self.base} | {name: (*self.base, setting) for name, _, setting in parted}

    @property
    def digest(self) -> str:
        """Names this plan among others."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def config(self, name: str, *overrides: str) -> Config:
        """A set's configuration under this plan.

        Raises:
            ConfigError: there is none, or a setting is wrong.
        """
        path = Path(self.configs) / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(f"set {name!r}: {path} does not exist, expected its configuration there")
        return load_config(path, (*self.settings, *overrides))


def load_plan(path: str | Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Reads a plan; errors are those of :func:`~jaxguard.settings.load_settings`."""
    return load_settings(path, overrides, Plan)
