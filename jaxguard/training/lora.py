"""Fine-tuning a router: LoRA on a causal language model (Safety Sentry, section 3.3 and appendix C).

LoRA goes on all linear projections; beside it, the rows of the three decision tokens are trained, in the embedding
and, where it is not tied to it, in the head. Everything else stays as it is, bit for bit. The loss is on the answer
alone. Runs on transformers' Trainer and PEFT, which are imported where they are used.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxguard.config import SEED
from jaxguard.features.decision_model import IDENTITY_FILE, ROUTER_FILE, add_decision_tokens, load_model, weights_hash
from jaxguard.features.decision_prompt import (
    DECISION_TOKENS,
    DEFAULT_PROMPT,
    STYLES,
    PromptEncoder,
    load_prompt,
)
from jaxguard.settings import load_settings, require, to_dict
from jaxguard.traces.review_sets import require_teachable
from jaxguard.training.completions import IGNORED, completion_records, digest_of
from jaxguard.types import JaxguardError, Trajectory
from jaxguard.writing import write_whole

_CHECKPOINTS = "checkpoints"
_STATE = "trainer_state.json"


class FinetuneError(JaxguardError):
    """A fine-tuning cannot start, go on or be used; the message says why."""


@dataclass(frozen=True)
class LoraSettings:
    """The recipe of appendix C; what the paper leaves open is marked.

    Attributes:
        rank: LoRA rank r.
        alpha: LoRA scaling; the update is scaled by alpha / rank.
        dropout: On the adapters' inputs.
        epochs: Passes over the records.
        max_steps: Optimiser steps instead of ``epochs``; 0: not limited.
        learning_rate: Peak, after the warm-up.
        schedule: A transformers schedule.
        warmup_steps: Optimiser steps of linear warm-up.
        batch_size: Records per device and pass (open in the paper).
        accumulate: Passes per optimiser step (open; 2 x 8 = 16 records per step).
        max_tokens: Longest record.
        style: ``"think"`` or ``"first"``, see :mod:`jaxguard.features.decision_prompt`.
        tokens: The decision tokens.
        prompt: A prompt file; the default prompt where None.
        optimiser: A transformers optimiser.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"auto"`` (bfloat16 on a GPU, float32 on a CPU); adapters and token
            rows are float32 always.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        activation_checkpointing: Compute activations twice to save memory.
        checkpoint_every: Optimiser steps between checkpoints, of which two are kept.
        log_every: Optimiser steps per logged loss.
        seed: Of adapters, dropout and order.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05
    epochs: int = 3
    max_steps: int = 0
    learning_rate: float = 2e-4
    schedule: str = "cosine"
    warmup_steps: int = 150
    batch_size: int = 2
    accumulate: int = 8
    max_tokens: int = 6144
    style: str = "think"
    tokens: tuple[str, ...] = DECISION_TOKENS
    prompt: str | None = None
    optimiser: str = "adamw_torch_fused"
    dtype: str = "auto"
    device: str = "auto"
    activation_checkpointing: bool = True
    checkpoint_every: int = 100
    log_every: int = 10
    seed: int = SEED

    def __post_init__(self) -> None:
        least = {"max_steps": 0, "warmup_steps": 0, "seed": 0} | dict.fromkeys(
            ("rank", "alpha", "epochs", "batch_size", "accumulate", "max_tokens", "checkpoint_every", "log_every"), 1
        )
        for name, smallest in least.items():
            require((value := getattr(self, name)) >= smallest, name, value, f"{smallest} or more")
        require(self.seed < 2**32, "seed", self.seed, f"less than {2**32}")  # what NumPy takes
        require(0 <= self.dropout < 1, "dropout", self.dropout, "a share in [0, 1)")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a positive number")
        for name, known in (
            ("style", STYLES),
            ("dtype", ("auto", "float32", "bfloat16")),
            ("device", ("auto", "cpu", "cuda")),
        ):
            require((value := getattr(self, name)) in known, name, value, f"one of {', '.join(known)}")


def load_lora_settings(path: str | Path | None, overrides: Sequence[str] = ()) -> LoraSettings:
    """Settings from a YAML file (or none) with ``key=value`` overrides.

    Raises:
        ConfigError: Unreadable file, unknown key, wrong type or impossible value.
    """
    return load_settings(path, overrides, LoraSettings)


@dataclass(frozen=True)
class FinetuneReport:
    """What a :func:`finetune` did; reviewed steps = records + left out.

    Attributes:
        records: Reviewed steps that were trained on.
        left_out: ``(trajectory:step, reason)`` of the others.
        answer_tokens: Tokens that carry loss, in one pass over the records.
        steps: Optimiser steps.
        trained: Trained parameters.
        losses: Mean loss per answer token of every ``log_every`` steps, in order.
        resumed_from: Step of the checkpoint that was taken up; 0 for none.
        seconds: Wall time of this call.
    """

    records: int
    left_out: tuple[tuple[str, str], ...]
    answer_tokens: int
    steps: int
    trained: int
    losses: tuple[float, ...]
    resumed_from: int
    seconds: float


def finetune(
    settings: LoraSettings,
    model_dir: Path,
    trajectories: Iterable[Trajectory],
    out: Path,
    progress: Callable[[int, float], object] | None = None,
) -> FinetuneReport:
    """Train an adapter for the model in ``model_dir`` on the reviewed steps of ``trajectories``.

    ``out`` gets the adapter, the tokenizer with the decision tokens and, last, ``router.json`` (prompt, tokens, style,
    settings, report). A killed run that is started again goes on from its newest checkpoint in ``out``; a finished
    one is not trained again.

    Args:
        settings: The recipe.
        model_dir: Folder of a causal language model; it is only read.
        trajectories: With ``reviews`` in their metadata (:mod:`jaxguard.training.completions`).
        out: Folder, made if it is not there.
        progress: Called with (step, loss) as losses are logged.

    Raises:
        FinetuneError: Packages, records or steps are too few; ``out`` holds another training; a loss is not finite.
        RouterModelError: The model cannot be loaded.
        PromptError: Prompt or tokens do not fit the tokenizer.
        SnapshotError: A trajectory's metadata are not what they should be.
        EvaluationOnly: A trajectory is for evaluation only.
    """
    started = time.monotonic()
    trajectories = list(trajectories)
    require_teachable(trajectories, f"fine-tuning {out}")
    try:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import set_seed
    except ImportError as error:
        raise FinetuneError(f"fine-tuning: {error.name} is not installed; pip install 'jaxguard[lora]'") from error
    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    dtype = ("bfloat16" if device == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype
    loaded = load_model(model_dir, dtype=dtype, device=device)
    model, tokenizer = loaded.model, loaded.tokenizer
    if tokenizer.eos_token_id is None:
        raise FinetuneError(f"model {model_dir}: its tokenizer has no end-of-sequence token")
    prompt = load_prompt(settings.prompt) if settings.prompt is not None else DEFAULT_PROMPT
    add_decision_tokens(model, tokenizer, settings.tokens)
    encode = PromptEncoder(tokenizer, prompt, settings.tokens, settings.style)
    records, left_out = completion_records(trajectories, encode, tokenizer.eos_token_id, settings.max_tokens)
    steps = _step_count(settings, len(records), len(left_out))
    identity = {
        "settings": to_dict(settings),
        "prompt": dataclasses.asdict(prompt),
        "base": weights_hash(model_dir),
        "records": digest_of(records),
        "arithmetic": f"{dtype} on {device}",
    }
    arguments = _arguments(settings, out, dtype, device)  # before the folder is claimed for settings that cannot be
    if (finished := _claim(out, identity)) is not None:
        return finished
    set_seed(settings.seed)
    model = get_peft_model(
        model,
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules="all-linear",
            trainable_token_indices=_trained_rows(model, list(encode.decisions)),
            task_type="CAUSAL_LM",
        ),
    )
    losses, resumed_from = _train(model, arguments, records, out, progress)
    if not np.isfinite(losses).all() or not all(p.isfinite().all() for p in model.parameters() if p.requires_grad):
        raise FinetuneError(f"fine-tuning {out}: a loss or a weight is not finite; try a lower learning_rate")
    report = FinetuneReport(
        records=len(records),
        left_out=tuple(left_out),
        answer_tokens=sum(label != IGNORED for record in records for label in record["labels"]),
        steps=steps,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        losses=tuple(losses),
        resumed_from=resumed_from,
        seconds=time.monotonic() - started,
    )
    # The embedding is the base's but for the rows that the adapter holds.
    try:
        model.save_pretrained(str(out), save_embedding_layers=False)
        tokenizer.save_pretrained(str(out))
    except Exception as error:  # a full disk, as libraries in other languages tell of it
        raise FinetuneError(f"fine-tuning {out}: cannot be written ({type(error).__name__}: {error})") from error
    about = {
        "prompt": dataclasses.asdict(prompt),
        "tokens": list(settings.tokens),
        "style": settings.style,
        "base": identity["base"],
        "settings": identity["settings"],
        "report": dataclasses.asdict(report),
    }
    write_whole(out / ROUTER_FILE, json.dumps(about, indent=2))
    return report


def _step_count(settings: LoraSettings, records: int, left_out: int) -> int:
    """Optimiser steps of the whole training."""
    if not records:
        raise FinetuneError(f"fine-tuning: no reviewed step to train on ({left_out} were left out)")
    passes = math.ceil(records / settings.batch_size)
    steps = settings.max_steps or settings.epochs * math.ceil(passes / settings.accumulate)
    if settings.warmup_steps >= steps:
        raise FinetuneError(
            f"warmup_steps: got {settings.warmup_steps}, expected fewer than the {steps} steps of {records} records"
        )
    return steps


def _claim(out: Path, identity: dict[str, Any]) -> FinetuneReport | None:
    """Mark ``out`` as this training's; its report if it is finished.

    Raises:
        FinetuneError: The folder belongs to another training.
    """
    marker = out / IDENTITY_FILE
    read = marker
    try:
        if marker.exists():
            found = json.loads(marker.read_text(encoding="utf-8"))
            if found != json.loads(json.dumps(identity)):
                names = [name for name in identity if found.get(name) != json.loads(json.dumps(identity[name]))]
                raise FinetuneError(f"fine-tuning {out}: was started with other {', '.join(names)}; use another folder")
            if (read := out / ROUTER_FILE).exists():
                values = json.loads((out / ROUTER_FILE).read_text(encoding="utf-8"))["report"]
                left_out = tuple((name, reason) for name, reason in values["left_out"])
                return FinetuneReport(**{**values, "left_out": left_out, "losses": tuple(values["losses"])})
            return None
        if out.exists() and any(out.iterdir()):
            raise FinetuneError(f"fine-tuning {out}: the folder holds something else; use another folder")
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_whole(marker, json.dumps(identity, indent=2))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FinetuneError(f"fine-tuning {out}: {read} cannot be used ({error!r})") from error
    return None


def _trained_rows(model: Any, rows: list[int]) -> dict[str, list[int]]:
    """For PEFT: the modules whose ``rows`` are trained. A tied head follows the embedding by itself."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[0].weight is ends[1].weight:
        ends.pop()
    return {name: rows for name, module in model.named_modules() if any(module is end for end in ends)}


def _arguments(settings: LoraSettings, out: Path, dtype: str, device: str) -> Any:
    """The settings in transformers' words.

    Raises:
        FinetuneError: transformers knows no such schedule or optimiser.
    """
    from transformers import TrainingArguments

    try:
        return TrainingArguments(
            output_dir=str(out / _CHECKPOINTS),
            num_train_epochs=settings.epochs,
            max_steps=settings.max_steps or -1,
            learning_rate=settings.learning_rate,
            lr_scheduler_type=settings.schedule,
            warmup_steps=settings.warmup_steps,
            per_device_train_batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.accumulate,
            optim=settings.optimiser,
            bf16=dtype == "bfloat16",
            use_cpu=device == "cpu",
            activation_checkpointing=settings.activation_checkpointing,
            save_steps=settings.checkpoint_every,
            save_total_limit=2,
            logging_steps=settings.log_every,
            logging_nan_inf_filter=False,
            seed=settings.seed,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
    except (ValueError, ImportError) as error:
        raise FinetuneError(f"schedule {settings.schedule!r}, optimiser {settings.optimiser!r}: {error}") from error


def _train(
    model: Any,
    arguments: Any,
    records: list[dict[str, list[int]]],
    out: Path,
    progress: Callable[[int, float], object] | None,
) -> tuple[list[float], int]:
    """Losses, and the step of the checkpoint that was taken up."""
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class Logged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if progress is not None and "loss" in (logs or {}):
                progress(state.global_step, logs["loss"])

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=records,
        data_collator=collate,
        callbacks=[Logged()],
    )
    trainer.remove_callback(PrinterCallback)
    # The state is written last: a checkpoint without it was cut short by a kill.
    complete = [int(path.parent.name.rpartition("-")[2]) for path in out.glob(f"{_CHECKPOINTS}/checkpoint-*/{_STATE}")]
    newest = max(complete, default=0)
    taken_up = out / _CHECKPOINTS / f"checkpoint-{newest}" if newest else None
    try:
        trainer.train(resume_from_checkpoint=str(taken_up) if taken_up else None)
    except Exception as error:  # memory, a disk, a damaged checkpoint, an optimiser that is not installed
        told = " ".join(f"{type(error).__name__}: {error}".split())
        hint = f"; it began from {taken_up}: where that is damaged, delete it" if taken_up else ""
        raise FinetuneError(f"fine-tuning {out}: stopped ({told}){hint}") from error
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry], newest


def collate(records: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Tensors [B, L] of ``input_ids``, ``attention_mask`` and ``labels``, padded on the right."""
    import torch

    width = max(len(record["input_ids"]) for record in records)
    batch = {
        "input_ids": np.zeros((len(records), width), np.int64),
        "attention_mask": np.zeros((len(records), width), np.int64),
        "labels": np.full((len(records), width), IGNORED, np.int64),
    }
    for at, record in enumerate(records):
        length = len(record["input_ids"])
        batch["input_ids"][at, :length] = record["input_ids"]
        batch["attention_mask"][at, :length] = 1
        batch["labels"][at, :length] = record["labels"]
    return {name: torch.from_numpy(values) for name, values in batch.items()}
