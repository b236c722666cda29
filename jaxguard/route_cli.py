"""``jaxguard route``: the router's commands."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxguard.route_config import load_route_config

OVERRIDES = "settings as dotted key=value pairs, applied after the config file; {} lists them"
TRAJECTORIES = "converted or generated trajectories; may be given several times"


def add_commands(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``route`` to the parser's commands; ``command`` makes one of them."""
    text = "EXECUTE, ASK or REFUSE: train, set and evaluate a router, or cache a language model's decisions"
    route = commands.add_parser("route", help=text, description=text + ".")
    routes = route.add_subparsers(dest="route_command", required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int | None], about: str) -> argparse.ArgumentParser:
        return command(name, function, about, among=routes)

    def configured(
        sub: argparse.ArgumentParser, listed: str = "jaxguard/route_config.py", like: str = "configs/route.yaml"
    ) -> None:
        sub.add_argument("--config", type=Path, metavar="FILE", help=f"YAML file of settings (see {like})")
        sub.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES.format(listed))

    def trajectories(sub: argparse.ArgumentParser, required: bool = True) -> None:
        sub.add_argument("--trajectories", action="append", required=required, metavar="DIR", help=TRAJECTORIES)

    sub = add("generate", _generate, "make seeded service steps with reviews (corpus.* settings)")
    sub.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the trajectories; those of an earlier call are replaced",
    )
    configured(sub)

    sub = add("train", _train, "train a router on reviewed trajectories; resumes where it stopped")
    sub.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder")
    sub.add_argument("--fresh", action="store_true", help="delete an earlier run in RUN and start over")
    sub.add_argument("--quiet", action="store_true", help="no progress bars")
    configured(sub)

    sub = add("calibrate", _calibrate, "choose tau at three operating points on held-out reviews")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder that route train wrote")
    sub.add_argument("overrides", nargs="*", metavar="routing.key=value", help="settings other than the run's")

    sub = add("evaluate", _evaluate, "route held-out reviewed steps, print tables and write the report")
    sub.add_argument("run", type=Path, metavar="RUN",
                     help="run folder with thresholds; with --trajectories also a bundle (RUN/router)")  # fmt: skip
    trajectories(sub, required=False)
    sub.add_argument("--store", type=Path, metavar="DIR", help="feature store with the texts of --trajectories")
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (with --trajectories)")
    sub.add_argument(
        "--grid", action="store_true", help="also generated steps as four kinds of agents would have left them"
    )

    sub = add("logits", _logits, "ask a language model for its decisions on reviewed steps and cache the logits")
    trajectories(sub)
    sub.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face causal language model")
    sub.add_argument("--adapter", type=Path, metavar="DIR", help="LoRA adapter that route finetune wrote")
    sub.add_argument("--store", type=Path, required=True, metavar="DIR", help="logit store; what is in it is kept")
    sub.add_argument("--tokens", nargs=3, metavar=("EXECUTE", "ASK", "REFUSE"), help="the decision tokens")
    sub.add_argument("--prompt", type=Path, metavar="FILE", help="prompt template (YAML: system, user)")
    sub.add_argument("--style", choices=("first", "think"), help="decide at once, or after a block of thought")
    sub.add_argument(
        "--max-think",
        type=int,
        default=256,
        metavar="N",
        help="longest block of thought, tokens; nearly all of the time goes there (%(default)s)",
    )
    sub.add_argument("--max-tokens", type=int, default=6144, metavar="N", help="longest prompt, tokens (%(default)s)")
    sub.add_argument("--batch-tokens", type=int, default=16_384, metavar="N", help="tokens of a batch (%(default)s)")
    sub.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    sub.add_argument("--device", default="cpu", metavar="NAME", help="PyTorch device (%(default)s)")
    sub.add_argument("--every", action="store_true", help="every step, not only the reviewed ones")

    sub = add("cached", _cached, "choose tau on cached logits of one half of the trajectories, evaluate on the other")
    trajectories(sub)
    sub.add_argument("--store", type=Path, required=True, metavar="DIR", help="logit store")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for thresholds and report")
    sub.add_argument("--partial", action="store_true", help="steps without logits are ASK and counted, not an error")
    configured(sub)

    sub = add("finetune", _finetune, "fine-tune a language model with LoRA on reviewed steps; resumes where it stopped")
    trajectories(sub)
    sub.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face causal language model")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the adapter")
    configured(sub, "jaxguard/training/lora.py", "configs/route_lora.yaml")


WITHOUT_LOGITS = 3
"""Exit status: done, but some steps have no logits."""


def _say(text: str) -> None:
    print(text, flush=True)


def _generate(arguments: argparse.Namespace) -> None:
    from jaxguard.traces.convert import write_made
    from jaxguard.traces.services.corpus import generate

    corpus = load_route_config(arguments.config, arguments.overrides).corpus
    count = write_made(generate(corpus.trajectories, corpus.seed), arguments.out)
    _say(f"wrote {count:,} reviewed trajectories of seed {corpus.seed} to {arguments.out}")


def _train(arguments: argparse.Namespace) -> None:
    from jaxguard.route_run import train_router

    config = load_route_config(arguments.config, arguments.overrides)
    started = time.perf_counter()
    router = train_router(config, arguments.out, fresh=arguments.fresh, progress=not arguments.quiet)
    _say(f"trained {config.name} in {time.perf_counter() - started:.1f} s")
    hint = "" if router.routing else "; `jaxguard route calibrate` chooses its thresholds"
    _say(f"wrote {arguments.out / 'router'}{hint}")


def _calibrate(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.wording import told_apart
    from jaxguard.route_run import calibrate_router

    routing = calibrate_router(arguments.run, arguments.overrides).routing
    assert routing is not None  # it was just chosen
    for name, tau in routing.taus.items():
        told = routing.provenance["points"][name]
        reached = ", ".join(f"{rate.upper()} {told[rate]:.3f}" for rate in ("oar", "uar") if told.get(rate) is not None)
        own = routing.services.get(name, {})
        services = "; ".join(f"{service} {told_apart(value, own.values())}" for service, value in own.items())
        active = ", in use" if name == routing.active else ""
        _say(f"{name}{active}: tau {tau:.4f}{f' ({reached})' if reached else ''}{f'; {services}' if services else ''}")
    for name, why in routing.impossible.items():
        _say(f"{name}: impossible, {why}")
    for service, why in routing.fell_back.get(routing.active, {}).items():
        _say(f"{service}: tau of all services ({why})")


def _evaluate(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.routing_page import render
    from jaxguard.route_run import evaluate_elsewhere, evaluate_router
    from jaxguard.types import JaxguardError

    if arguments.trajectories:
        if arguments.grid:
            raise JaxguardError("--grid: is for a run's own test part, not for --trajectories")
        bundle = arguments.run if (arguments.run / "router.json").exists() else arguments.run / "router"
        if arguments.out is None:
            raise JaxguardError("--out: got none, expected a folder for the report on --trajectories")
        done = evaluate_elsewhere(bundle, arguments.trajectories, arguments.out, store=arguments.store)
    elif arguments.store is not None or arguments.out is not None:
        raise JaxguardError("--store, --out: are for --trajectories; a run has its own")
    else:
        done = evaluate_router(arguments.run, grid=arguments.grid)
    _say(render(done[0], done[1]))
    _say(f"wrote {done[2]}")


def _logits(arguments: argparse.Namespace) -> int:
    from jaxguard.features.decision_logits import DecisionReader, cache_logits, reviewed_snapshots
    from jaxguard.features.decision_prompt import load_prompt
    from jaxguard.inputs import load_trajectories
    from jaxguard.traces.review_sets import reviewed
    from jaxguard.traces.snapshots import reviews_of
    from jaxguard.types import JaxguardError

    trajectories = list(reviewed(load_trajectories(arguments.trajectories).values()))
    if not arguments.every and not any(reviews_of(t) for t in trajectories):
        raise JaxguardError(
            f"--trajectories: got {len(trajectories)}, none with a review, expected some; --every asks about all steps"
        )
    reader = DecisionReader(
        arguments.model,
        adapter=arguments.adapter,
        tokens=arguments.tokens,
        prompt=None if arguments.prompt is None else load_prompt(arguments.prompt),
        style=arguments.style,
        max_tokens=arguments.max_tokens,
        max_think=arguments.max_think,
        batch_tokens=arguments.batch_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    report = cache_logits(
        reviewed_snapshots(trajectories, every=arguments.every), arguments.store, reader, progress=_count
    )
    for name, reason in report.rejected:
        _say(f"rejected: {name}: {reason}")
    for name in report.unscored:
        _say(f"unscored: {name}: its logits are not finite, or beyond what a store holds")
    _say(
        f"{report.snapshots:,} snapshots: {report.scored:,} scored by {reader.fingerprint}, {report.reused:,} were "
        f"there, {len(report.rejected):,} rejected, {len(report.unscored):,} unscored; "
        f"{len(report.forced):,} blocks of thought were cut"
    )
    return WITHOUT_LOGITS if report.rejected or report.unscored else 0


def _count(done: int) -> None:
    print(f"{done:,} snapshots", file=sys.stderr, flush=True)


def _cached(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.routing_page import render
    from jaxguard.route_run import evaluate_cached

    config = load_route_config(arguments.config, arguments.overrides)
    result, about, page = evaluate_cached(
        arguments.store, arguments.trajectories, arguments.out, config, partial=arguments.partial
    )
    _say(render(result, about))
    _say(f"wrote {page}")


def _finetune(arguments: argparse.Namespace) -> None:
    from jaxguard.inputs import load_trajectories
    from jaxguard.traces.review_sets import reviewed
    from jaxguard.training.lora import finetune, load_lora_settings

    settings = load_lora_settings(arguments.config, arguments.overrides)
    trajectories = reviewed(load_trajectories(arguments.trajectories).values())
    report = finetune(settings, arguments.model, trajectories, arguments.out, progress=_loss)
    for name, reason in report.left_out:
        _say(f"left out: {name}: {reason}")
    _say(f"{report.records:,} records, {report.steps:,} steps; wrote {arguments.out}")


def _loss(step: int, loss: float) -> None:
    print(f"step {step:,}: loss {loss:.4f}", file=sys.stderr, flush=True)
