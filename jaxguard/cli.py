"""The command line: parse, build the configuration, call one library function, print what it did."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxguard
from jaxguard import arena_cli, audit_cli, experiment_cli, llm_cli, rivals_cli, route_cli
from jaxguard.config import PRECISIONS, load_config
from jaxguard.types import JaxguardError

if TYPE_CHECKING:
    from jaxguard.guard import Guard

DESCRIPTION = """\
jaxguard says, before an LLM agent's tool call runs, whether it may: PASS, HOLD or BLOCK, or (`route`) EXECUTE, ASK or
REFUSE.

From traces to verdicts:
  1. convert    traces in any known format -> trajectories       (or: generate drift trajectories)
  2. embed      texts of trajectories -> feature store
  3. train      world model, then risk heads -> run folder
  4. calibrate  thresholds at a chosen false-alert level -> guard bundle
  5. evaluate   held-out trajectories -> tables and an HTML report
  6. score      an archive of traces -> Parquet, one row per step
  7. report     a scored archive -> a summary and an HTML page

Exit status: 0 done, 1 refused with a message, 2 misuse, 130 interrupted; 3 done, but convert or score could not read
some files, which another run tries again, or route logits has none for some steps. Rejected records are no error.
"""
FORMAT = "format of the traces, one of those that `jaxguard formats` lists; recognised by itself if left out"
ARCHIVE = (
    "trace file, folder, quoted glob, or an address such as s3://bucket/traces (through fsspec); JSON lines, JSON, "
    "Parquet and what `jaxguard formats` lists, also .gz and .zip"
)
UNREAD = 3
"""Exit status: done, but some files could not be read."""
OVERRIDES = (
    "settings as dotted key=value pairs, applied after the config file, e.g. stage1.steps=500 "
    "encoder.layer=6 recipe=paper; jaxguard/config.py lists them"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 refused with a message, 2 misuse, 130 interrupted, and
    :data:`UNREAD`."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if arguments.verbose:
        logging.getLogger("jaxguard").setLevel(logging.INFO)
    try:
        return arguments.function(arguments) or 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _refuse(arguments, "interrupted", 130)
    except RecursionError as error:
        return _refuse(arguments, f"the input is nested too deeply ({error})")
    except MemoryError as error:
        return _refuse(arguments, f"out of memory ({str(error) or 'no more is known'})")
    except _jax_errors() as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refuse(arguments, f"out of memory ({str(error).strip().splitlines()[0]})")
    except UnicodeError as error:
        return _refuse(arguments, f"a text cannot be decoded or encoded ({error})")
    except (JaxguardError, OSError) as error:
        return _refuse(arguments, str(error))


def _jax_errors() -> tuple[type[BaseException], ...]:
    """What jax raises, among it when memory runs out; nothing where jax was not needed."""
    return (sys.modules["jax"].errors.JaxRuntimeError,) if "jax" in sys.modules else ()


def _refuse(arguments: argparse.Namespace, message: str, status: int = 1) -> int:
    from jaxguard.evaluation.wording import visible

    print(visible(f"jaxguard {arguments.command}: {message}"), file=sys.stderr)
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="jaxguard", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"jaxguard {jaxguard.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str,
        function: Callable[[argparse.Namespace], int | None],
        help_text: str,
        *,
        config: bool = False,
        among: Any = commands,
    ) -> argparse.ArgumentParser:
        sub = among.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        sub.set_defaults(function=function)
        sub.add_argument("-v", "--verbose", action="store_true", help="print what is being done to stderr")
        if config:
            sub.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings (see configs/)")
            sub.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
        return sub

    def quiet(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--quiet", action="store_true", help="no progress bars")

    command("formats", _formats, "list the trace formats that convert and score recognise")

    sub = command("convert", _convert, "turn traces of a known format into trajectories")
    sub.add_argument("path", metavar="PATH", help=ARCHIVE)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for trajectories and rejects")
    sub.add_argument("--format", metavar="NAME", help=FORMAT)

    sub = command("generate", _generate, "make seeded drift trajectories (data.drift.* settings)", config=True)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the trajectories")

    sub = command("embed", _embed, "encode the texts of trajectories into a feature store", config=True)
    sub.add_argument("--trajectories", type=Path, action="append", required=True, metavar="DIR",
                     help="converted or generated trajectories; may be given several times")  # fmt: skip
    sub.add_argument("--store", type=Path, required=True, metavar="DIR", help="feature store; texts in it are kept")
    text = "also what a router reads, of steps whose review follows from a hazard label; of other reviews it always is"
    sub.add_argument("--router", action="store_true", help=text)
    quiet(sub)

    sub = command("train", _train, "train the world model and the risk heads; resumes where it stopped", config=True)
    sub.add_argument("--out", type=Path, required=True, metavar="RUN", help="run folder")
    sub.add_argument("--fresh", action="store_true", help="delete an earlier run in RUN and start over")
    quiet(sub)

    sub = command("calibrate", _calibrate, "set the thresholds of a trained run at its false-alert levels")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder that train wrote")
    sub.add_argument("overrides", nargs="*", metavar="decision.key=value", help="levels and rules other than the run's")

    sub = command("recalibrate", _recalibrate, "set a guard's thresholds anew on safe trajectories of another place")
    guard = "calibrated guard bundle, e.g. RUN/guard (default: the guard in the package)"
    sub.add_argument("--guard", type=Path, default=jaxguard.DEFAULT_GUARD, metavar="BUNDLE", help=guard)
    sub.add_argument("--trajectories", type=Path, action="append", required=True, metavar="DIR",
                     help="converted trajectories; the safe ones are used; may be given several times")  # fmt: skip
    sub.add_argument("--unlabelled-are-safe", action="store_true", help="take trajectories without a label as safe")
    sub.add_argument("--store", type=Path, metavar="DIR", help="feature store with their texts (default: encode them)")
    sub.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="guard bundle to write")
    sub.add_argument(
        "overrides", nargs="*", metavar="decision.key=value", help="levels and rules other than the guard's"
    )

    sub = command(
        "transfer", _transfer, "measure a run's guard, with old and new thresholds, on traces of another place"
    )
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder, calibrated")
    sub.add_argument("--trajectories", type=Path, action="append", required=True, metavar="DIR",
                     help="converted trajectories with labels; may be given several times")  # fmt: skip
    sub.add_argument("--store", type=Path, metavar="DIR", help="feature store with their texts (default: the run's)")
    sub.add_argument("--alpha", type=float, metavar="LEVEL", help="false-alert level (default: that of the run's HOLD)")

    sub = command("evaluate", _evaluate, "score a held-out part of a run, print tables and write the report")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder, calibrated")
    sub.add_argument("--part", default="test", help="train, validation, calibration or test (default: %(default)s)")

    rivals_cli.add_command(command)
    experiment_cli.add_commands(command)

    sub = command(
        "diagnose", _diagnose, "show what a run's world model carries: latents, probes, gradients, loss curves"
    )
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder that train wrote")

    sub = command("compare", _compare, "put evaluated runs side by side, with mean and range")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders that evaluate wrote a report to")

    sub = command("score", _score, "score an archive of traces with a guard bundle")
    sub.add_argument("archive", metavar="ARCHIVE", help=ARCHIVE)
    sub.add_argument("--guard", type=Path, default=jaxguard.DEFAULT_GUARD, metavar="BUNDLE", help=guard)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    sub.add_argument("--store", type=Path, metavar="DIR", help="feature store to reuse (default: DIR/features)")
    sub.add_argument("--format", metavar="NAME", help=FORMAT)
    text = "bfloat16 is faster with AMX or a GPU, and moves what lies at a threshold (default: %(default)s)"
    sub.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help=text)
    text = "work in this process, or in many with Ray (default: %(default)s)"
    sub.add_argument("--engine", choices=("local", "ray"), default="local", help=text)
    sub.add_argument("--workers", type=int, metavar="N", help="actors of Ray (default: one per GPU, or per 4 CPUs)")
    sub.add_argument("--ray-address", metavar="ADDRESS", help="Ray cluster (default: Ray is started on this machine)")
    quiet(sub)

    sub = command("report", _report, "show what a scored archive holds: a summary, and a page in DIR/report")
    sub.add_argument("results", type=Path, metavar="DIR", help="folder that score wrote")

    route_cli.add_commands(commands, command)
    audit_cli.add_commands(commands, command)
    llm_cli.add_commands(commands, command)
    arena_cli.add_commands(commands, command)

    text = "tables of benchmark runs: one with a report, or two compared"
    bench = commands.add_parser("bench", help=text, description=text[0].upper() + text[1:] + ".")
    benches = bench.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    json_help = "file that `pytest bench --benchmark-json=FILE` wrote"
    sub = command("compare", _bench_compare, "say what is faster or slower in B than in A", among=benches)
    sub.add_argument("a", type=Path, metavar="A", help=json_help)
    sub.add_argument("b", type=Path, metavar="B", help="another such file")
    sub = command("report", _bench_report, "print a run's tables and write its report", among=benches)
    sub.add_argument("run", type=Path, metavar="RUN", help=json_help)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for report.html and .md, table.csv")
    return parser


def _say(text: str) -> None:
    print(text, flush=True)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in values.items() if value)


def _formats(_: argparse.Namespace) -> None:
    from jaxguard.traces.registry import all_readers

    for reader in all_readers():
        _say(f"{reader.name:16} {reader.description}")


def _convert(arguments: argparse.Namespace) -> int:
    from jaxguard.evaluation.wording import visible
    from jaxguard.traces.convert import convert

    report = convert(arguments.path, arguments.out, format=arguments.format)
    for file in report.files:
        found = ", ".join(f"{count:,} {name}" for name, count in file.formats.items()) or "nothing recognised"
        problem = f"; {file.error}" if file.error else ""
        _say(f"{visible(str(file.file))}: {found}; {file.rejected:,} rejected records{visible(problem)}")
    for skipped in report.skipped_files:
        _say(visible(f"not read: {skipped}"))
    for file in report.files:
        if file.unread:
            _say(visible(f"unread, or not to its end: {file.file}"))
    _say(_pairs(report.counts))
    _say(f"wrote {arguments.out}")
    return UNREAD if any(file.unread for file in report.files) else 0


def _generate(arguments: argparse.Namespace) -> None:
    from jaxguard.traces.convert import write_made
    from jaxguard.traces.drift import generate

    drift = load_config(arguments.config, arguments.overrides).data.drift
    count = write_made(generate(drift.trajectories, drift.seed), arguments.out)
    _say(f"wrote {count:,} drift trajectories of seed {drift.seed} to {arguments.out}")


def _embed(arguments: argparse.Namespace) -> None:
    from itertools import chain

    from tqdm import tqdm

    from jaxguard.features.embed import embed
    from jaxguard.features.encoder import load_encoder
    from jaxguard.features.store import FeatureStore
    from jaxguard.traces.jsonl import read_trajectories
    from jaxguard.traces.review_sets import reviewed

    config = load_config(arguments.config, arguments.overrides)
    trajectories = chain.from_iterable(read_trajectories(path) for path in arguments.trajectories)
    encoder = load_encoder(config.encoder)
    store = FeatureStore.create_or_open(arguments.store, encoder.fingerprint, encoder.dim)
    with tqdm(desc="embed", unit="window", disable=arguments.quiet) as bar:
        report = embed(
            reviewed(trajectories) if arguments.router else trajectories,
            store,
            encoder,
            thought=config.data.thought,
            grounded=config.model.grounded,
            progress=lambda _stored, windows: bar.update(windows - bar.n),
        )
    _say(
        f"{report.unique:,} distinct texts of {report.trajectories:,} trajectories: {report.embedded:,} encoded by "
        f"{encoder.fingerprint} at {report.texts_per_s:.0f} texts/s, {report.already_there:,} were there"
    )


def _train(arguments: argparse.Namespace) -> None:
    from jaxguard.run import train

    config = load_config(arguments.config, arguments.overrides)
    started = time.perf_counter()
    guard = train(config, arguments.out, fresh=arguments.fresh, progress=not arguments.quiet)
    seconds, share = time.perf_counter() - started, guard.provenance["pooled_share"]
    _say(f"trained {config.name} in {seconds:.1f} s, pooled head's share of the hazard logit {share:g}")
    _say(
        f"wrote {arguments.out / 'guard'}" + ("" if guard.calibration else "; `jaxguard calibrate` sets its thresholds")
    )


def _calibrate(arguments: argparse.Namespace) -> None:
    from jaxguard.run import calibrate_run

    _say_thresholds(calibrate_run(arguments.run, arguments.overrides))


def _recalibrate(arguments: argparse.Namespace) -> None:
    from jaxguard.run import recalibrate

    _say_if_default(arguments.guard)
    paths = [str(path) for path in arguments.trajectories]
    guard = recalibrate(
        arguments.guard,
        paths,
        arguments.out,
        arguments.overrides,
        store=arguments.store,
        unlabelled_are_safe=arguments.unlabelled_are_safe,
    )
    _say_thresholds(guard)
    _say(f"wrote {arguments.out}")


def _say_if_default(guard: Path) -> None:
    if guard == jaxguard.DEFAULT_GUARD:
        _say(f"guard: the one in the package, for agents like those in {guard / 'MODEL_CARD.md'}")


def _say_thresholds(guard: Guard) -> None:
    calibration = guard.calibration
    assert calibration is not None  # the caller set it
    block, hold = calibration.band()
    for name, threshold, band in (("BLOCK", calibration.block, block), ("HOLD", calibration.hold, hold)):
        raised = (
            "" if threshold.raised_from is None else f" (raised from {threshold.raised_from:.4f}, which loses little)"
        )
        level = f"at most {band.high:.3f}" if raised else f"{band.low:.3f} to {band.high:.3f}"
        _say(
            f"{name} above {threshold.value:.4f}{raised}: alpha {threshold.alpha:g} on {threshold.n:,} safe "
            f"trajectories; the true false-alert level is {level} with {band.level:.0%} probability"
        )
    if calibration.group_key:
        _say(
            f"own thresholds for {calibration.group_key}: {', '.join(calibration.hold_groups) or 'none'}; "
            f"pooled (too few): {', '.join(calibration.hold_too_small) or 'none'}"
        )
    fusion = calibration.provenance.get("fusion")
    how = "kept" if not isinstance(fusion, dict) else "fitted on validation" if fusion["fitted"] else "the default"
    figures = [
        f"{name} {fusion[name]:.3f}"
        for name in ("auroc", "timeliness")
        if isinstance(fusion, dict) and fusion.get(name) is not None
    ]
    weights = zip(("hazard", "ema", "win"), calibration.fusion.weights, strict=True)
    _say(f"fusion: {', '.join([how, *figures])}; weights {', '.join(f'{name} {weight:g}' for name, weight in weights)}")


def _transfer(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.transfer import render_transfer
    from jaxguard.run import transfer_run

    paths = [str(path) for path in arguments.trajectories]
    _say(render_transfer(transfer_run(arguments.run, paths, alpha=arguments.alpha, store=arguments.store)))


def _evaluate(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.table import render
    from jaxguard.run import evaluate_run

    result, _, page = evaluate_run(arguments.run, arguments.part)
    _say(render(result))
    _say(f"wrote {page}")


def _diagnose(arguments: argparse.Namespace) -> None:
    from jaxguard.diagnosis import diagnose_run
    from jaxguard.evaluation.diagnose import render

    result, page = diagnose_run(arguments.run)
    _say(render(result))
    _say(f"wrote {page}")


def _compare(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.compare import render_comparison

    _say(render_comparison(arguments.runs))


def _score(arguments: argparse.Namespace) -> int:
    from jaxguard.evaluation.wording import visible
    from jaxguard.guard import Guard
    from jaxguard.scoring.archive import Engine, score_archive, score_here

    _say_if_default(arguments.guard)
    engine: Engine = score_here
    if arguments.engine == "ray":
        from jaxguard.scoring.ray_engine import RayEngine

        engine = RayEngine(arguments.guard, arguments.workers, arguments.ray_address)
    elif arguments.workers is not None or arguments.ray_address is not None:
        raise JaxguardError("--workers, --ray-address: are for --engine ray")
    report = score_archive(
        arguments.archive,
        Guard.load(arguments.guard, precision=arguments.precision),
        arguments.out,
        store=arguments.store,
        bundle=arguments.guard,
        format=arguments.format,
        progress=not arguments.quiet,
        engine=engine,
    )
    counts, done = report.counts, report.run
    for skipped in report.skipped_files:
        _say(visible(f"not read: {skipped}"))
    for name, reason in report.unread_files.items():
        _say(visible(f"unread, another run tries again: {name}: {reason}"))
    if counts["files_rejected"]:
        _say(f"{counts['files_rejected']:,} of {counts['files']:,} files rejected")
    _say(
        f"{counts['records']:,} records, {counts['rejected']:,} rejected: {counts['trajectories']:,} trajectories, "
        f"{counts['steps']:,} steps"
        + (f" ({counts['without_steps']:,} without a call)" if counts["without_steps"] else "")
    )
    rate = done["steps"] / max(report.seconds, 1e-9)
    _say(
        f"this run: {done['steps']:,} steps scored, {done['texts_embedded']:,} texts embedded, "
        f"{done['compiled']} programs compiled, {report.seconds:,.1f} s "
        f"({rate:,.0f} steps/s)"
    )
    for name, meaning in (
        ("superseded", "edited since they were scored; their old rows are in superseded/"),
        ("kept", "no longer in the archive, rows kept"),
    ):
        if done[name]:
            _say(f"{done[name]:,} files {meaning}")
    _say(f"trajectories: {_pairs(report.decisions)}")
    if report.shift_at is not None:
        _say(
            f"from about trajectory {report.shift_at:,} on, or before, they do not look like the guard's calibration "
            "set (safe trajectories): attacks, or another kind of traces, on which neither the false-alert level nor a "
            "PASS means much; see `jaxguard recalibrate`"
        )
    _say(f"wrote {arguments.out}")
    return UNREAD if report.unread_files else 0


def _report(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.archive_page import render, report_archive

    archive, page = report_archive(arguments.results)
    _say(render(archive))
    _say(f"wrote {page}")


def _bench_compare(arguments: argparse.Namespace) -> None:
    from jaxguard.benchmarks.compare import render_comparison
    from jaxguard.benchmarks.records import read_run

    _say(render_comparison(read_run(arguments.a), read_run(arguments.b)))


def _bench_report(arguments: argparse.Namespace) -> None:
    from jaxguard.benchmarks.records import read_run
    from jaxguard.benchmarks.report import render_tables, write_report

    run = read_run(arguments.run)
    _say(render_tables(run))
    for path in write_report(run, arguments.out):
        _say(f"wrote {path}")
