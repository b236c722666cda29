"""``jaxguard llm`` and ``jaxguard online``: guards and agents behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxguard.types import JaxguardError

if TYPE_CHECKING:
    from jaxguard.baselines.endpoint import Usage

TRAJECTORIES = "converted or generated trajectories; may be given several times"
OVERRIDES = "settings as dotted key=value pairs, applied after the config file, e.g. "


def add_commands(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``llm`` and ``online`` to the parser's commands; ``command`` makes one of them."""
    text = "language models behind an OpenAI-compatible endpoint as guards"
    llm = commands.add_parser("llm", help=text, description=text[0].upper() + text[1:] + ".")
    among = llm.add_subparsers(dest="llm_command", required=True, metavar="COMMAND")
    command("styles", _styles, "list the styles in which a language model can be asked", among=among)
    sub = command("score", _score, "ask a language model for the risk of every step", among=among)
    _common(sub, "endpoint.key_variable=MY_KEY endpoint.timeout=30; jaxguard/baselines/endpoint.py lists them")
    sub.add_argument("--style", required=True, metavar="NAME", help="one of those that `jaxguard llm styles` lists")
    sub.add_argument("--template", type=Path, metavar="FILE", help="prompt file in place of the style's own")
    sub.add_argument("--policy", type=Path, metavar="FILE", help="rules, one a line, for style policy")
    sub.add_argument("--limit", type=int, metavar="N", help="a sample of N trajectories, by risk type and label")

    text = "let an agent work on cases behind guards, judge what it did: Safety Rate and Utility Rate"
    sub = command("online", _online, text)
    _common(sub, "cases=50 hold=ask judge.model=NAME; jaxguard/online/run.py lists them")
    sub.add_argument("--scripted", action="store_true",
                     help="agent and judge replay recorded calls and labels, without a language model")  # fmt: skip
    sub.add_argument("--guard", action="append", default=[], metavar="[NAME=]BUNDLE",
                     help="calibrated guard bundle (RUN/guard); may be given several times")  # fmt: skip
    sub.add_argument("--llm-guard", action="append", default=[], metavar="STYLE=THRESHOLD",
                     help="language model as a guard, at the agent's endpoint or guard.url; several times")  # fmt: skip
    sub.add_argument("--test-of", type=Path, metavar="RUN", help="only trajectories of the test part of this run")


def _common(sub: argparse.ArgumentParser, settings: str) -> None:
    sub.add_argument("--trajectories", action="append", required=True, metavar="DIR", help=TRAJECTORIES)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    sub.add_argument("--endpoint", metavar="URL", help="address up to /chat/completions, e.g. http://localhost:8000/v1")
    sub.add_argument("--model", metavar="NAME", help="model there")
    sub.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    sub.add_argument("--quiet", action="store_true", help="no progress bars")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES + settings)


def _say(text: str) -> None:
    print(text, flush=True)


def _overrides(arguments: argparse.Namespace, section: str) -> Sequence[str]:
    """Address and model as overrides, before those that were written out."""
    named = {"url": arguments.endpoint, "model": arguments.model}
    quoted = [f"{section}.{name}={_yaml_text(value)}" for name, value in named.items() if value is not None]
    return [*quoted, *arguments.overrides]


def _yaml_text(value: str) -> str:
    """A text that YAML reads as that text, whatever it looks like."""
    return "'" + value.replace("'", "''") + "'"


def _styles(_: argparse.Namespace) -> None:
    from jaxguard.baselines.llm import STYLES

    for name, about in STYLES.items():
        _say(f"{name:12} {about}")


def _score(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from jaxguard.baselines.llm_run import LlmConfig, score_with_llm
    from jaxguard.inputs import load_trajectories
    from jaxguard.settings import load_settings

    config = load_settings(arguments.config, _overrides(arguments, "endpoint"), LlmConfig)
    trajectories = list(load_trajectories(arguments.trajectories).values())
    with tqdm(desc="ask", unit="step", disable=arguments.quiet, file=sys.stderr) as bar:
        report = score_with_llm(
            trajectories,
            arguments.out,
            config,
            arguments.style,
            template=arguments.template,
            policy=arguments.policy,
            limit=arguments.limit,
            progress=lambda done, _: bar.update(done - bar.n),
        )
    unscored = report.steps - report.scored
    _say(
        f"{report.trajectories:,} trajectories, {report.steps:,} steps: {report.scored:,} scored, {unscored:,} unscored"
    )
    for problem, count in report.problems.items():
        _say(f"unscored: {count:,} {problem}")
    _say(describe(report.usage))
    _say(f"wrote {arguments.out}")


def describe(usage: Usage) -> str:
    """Calls, tokens and cost in one line."""
    cost = "cost unknown (no prices given)" if usage.cost is None else f"cost {usage.cost:.4f}"
    text = (
        f"{usage.answered:,} calls answered, {usage.cached:,} from the cache, {usage.failed:,} failed, "
        f"{usage.retries:,} retries; {usage.prompt_tokens:,} tokens read, {usage.completion_tokens:,} written, {cost}"
    )
    return text + (f"; {usage.without_tokens:,} answers told no tokens" if usage.without_tokens else "")


def _online(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from jaxguard.baselines.endpoint import Endpoint
    from jaxguard.baselines.llm import LlmGuard
    from jaxguard.guard import Guard
    from jaxguard.inputs import SPLITS_FILE, load_trajectories
    from jaxguard.online.conditions import Condition, Guarded, Rivalled, Unguarded
    from jaxguard.online.page import render
    from jaxguard.online.run import OnlineConfig, evaluate_online
    from jaxguard.settings import load_settings
    from jaxguard.traces.splits import load_splits

    config = load_settings(arguments.config, _overrides(arguments, "agent"), OnlineConfig)
    trajectories = load_trajectories(arguments.trajectories)
    if arguments.test_of is not None:
        parts = load_splits(arguments.test_of / SPLITS_FILE)
        if "test" not in parts:
            raise JaxguardError(f"--test-of {arguments.test_of}: its split has no part test, only {', '.join(parts)}")
        absent = [name for name in parts["test"] if name not in trajectories]
        if absent:
            raise JaxguardError(
                f"--trajectories: lack {len(absent):,} of the {len(parts['test']):,} test trajectories of "
                f"{arguments.test_of}, e.g. {absent[0]!r}"
            )
        trajectories = {name: trajectories[name] for name in parts["test"]}
    elif arguments.guard:
        _say("note: without --test-of RUN a guard may meet trajectories that it was trained on")
    guards: list[Condition] = [
        Guarded(name or path, Guard.load(path)) for name, _, path in (_named(text) for text in arguments.guard)
    ]
    asked = [_threshold(text) for text in arguments.llm_guard]

    def conditions(opened: Callable[[], Endpoint]) -> list[Condition]:
        rivals = [Rivalled(style, LlmGuard(opened(), style, config.llm), threshold) for style, threshold in asked]
        return [Unguarded(), *guards, *rivals]

    with tqdm(desc="run", unit="case", disable=arguments.quiet, file=sys.stderr) as bar:
        report = evaluate_online(
            list(trajectories.values()),
            arguments.out,
            config,
            conditions,
            scripted=arguments.scripted,
            progress=lambda done, _: bar.update(done - bar.n),
        )
    _say(render(report.online))
    for role, usage in report.usage.items():
        _say(f"{role}: {describe(usage)}")
    _say(f"wrote {report.page}")


def _named(text: str) -> tuple[str, str, str]:
    """Name (perhaps ``""``), ``=`` and path."""
    name, separator, path = text.partition("=")
    return (name, separator, path) if separator else ("", "", text)


def _threshold(text: str) -> tuple[str, float]:
    style, _, value = text.partition("=")
    try:
        return style, float(value)
    except ValueError:
        raise JaxguardError(f"--llm-guard: got {text!r}, expected STYLE=THRESHOLD, e.g. category=0.5") from None
