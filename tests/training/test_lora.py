"""Fine-tuning a router on tiny random Qwen3 models: what is trained, on which tokens, and what comes back."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

import torch
import transformers
from router_models import make_model, make_tokenizer, make_trajectory

from jaxguard.features.decision_logits import DecisionReader, cache_logits, read_logits, reviewed_snapshots
from jaxguard.features.decision_model import RouterModelError, add_decision_tokens, load_model
from jaxguard.features.decision_prompt import DECISION_TOKENS, DEFAULT_PROMPT, Prompt, PromptEncoder
from jaxguard.features.store import FeatureStore
from jaxguard.settings import ConfigError
from jaxguard.traces.review_sets import EvaluationOnly
from jaxguard.traces.snapshots import TRIGGERS, SnapshotError, snapshot
from jaxguard.training import lora
from jaxguard.training.completions import IGNORED, REASONS, completion_records, rationales_of
from jaxguard.training.lora import FinetuneError, LoraSettings, collate, finetune, load_lora_settings
from jaxguard.types import Route

torch.set_num_threads(1)
RUNS = [make_trajectory(name, 3, memory="I like care.") for name in ("one", "two")]
QUICK = LoraSettings(
    rank=4,
    alpha=8,
    max_steps=6,
    warmup_steps=1,
    learning_rate=2e-2,
    batch_size=2,
    accumulate=1,
    checkpoint_every=2,
    log_every=1,
    device="cpu",
    activation_checkpointing=False,
    prompt=None,
    style="first",
)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompt") / "p.yaml"
    path.write_text("system: decide\nuser: '{snapshot}'\n")
    return str(path)


@pytest.fixture
def quick(prompt_file: str) -> LoraSettings:
    return dataclasses.replace(QUICK, prompt=prompt_file)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list:
    """The models as training left them, before anything is written or read back."""
    kept: list = []
    original = lora._train

    def keep(model: object, *rest: object) -> object:
        done = original(model, *rest)
        kept.append(model)
        return done

    monkeypatch.setattr(lora, "_train", keep)
    return kept


def encoder(path: Path, style: str = "think", prompt: Prompt = DEFAULT_PROMPT) -> PromptEncoder:
    net, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(path), make_tokenizer()
    add_decision_tokens(net, tokenizer, DECISION_TOKENS)
    return PromptEncoder(tokenizer, prompt, DECISION_TOKENS, style)


@pytest.mark.parametrize(
    ("tied", "style", "rows"),
    [
        pytest.param(True, "think", 320, marks=pytest.mark.slow),
        (False, "first", 320),
        (True, "first", 261),
        pytest.param(False, "first", 261, marks=pytest.mark.slow),
    ],
)
def test_only_adapters_and_three_rows_are_trained_and_logits_survive_a_reload(
    tied: bool, style: str, rows: int, quick: LoraSettings, trained: list, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "base", tied=tied, rows=rows)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    report = finetune(dataclasses.replace(quick, style=style), path, RUNS, tmp_path / "out")
    assert before == {file.name: file.read_bytes() for file in path.iterdir()}
    assert (report.records, report.left_out, report.steps, report.resumed_from) == (6, (), 6, 0)
    assert len(report.losses) == 6
    assert np.mean(report.losses[-2:]) < 0.9 * report.losses[0]

    # Bytes of everything that was in the base, but for the rows of the decision tokens.
    [model] = trained
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chosen = tokenizer.convert_tokens_to_ids(list(DECISION_TOKENS))
    fresh, start = transformers.AutoModelForCausalLM.from_pretrained(path), make_tokenizer()
    add_decision_tokens(fresh, start, DECISION_TOKENS)
    wrapped = {
        name.replace("base_model.model.", "").replace(".base_layer", "").replace(".token_adapter", ""): value
        for name, value in model.state_dict().items()
        if "lora_" not in name and "trainable_tokens" not in name
    }
    expected = fresh.state_dict()
    assert wrapped.keys() == expected.keys()
    for name, value in expected.items():
        assert wrapped[name].numpy().tobytes() == value.numpy().tobytes(), name
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    assert all("lora_" in name or "trainable_tokens_delta" in name for name in names)
    deltas = [value for name, value in model.named_parameters() if "trainable_tokens_delta" in name]
    assert len(deltas) == (1 if tied else 2)
    for delta in deltas:
        assert delta.shape == (3, 32)
        assert not torch.equal(delta, fresh.get_input_embeddings().weight[chosen])
    linear = {name.rpartition(".lora_A")[0].rpartition(".")[2] for name in names if "lora_A" in name}
    assert linear == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    # The end of training against a new process's view of the folders.
    ids = torch.tensor([tokenizer.encode("what now?") + chosen])
    with torch.no_grad():
        ended = model.eval()(ids).logits
        loaded = load_model(path, tmp_path / "out")
        again = loaded.model(ids).logits
        untrained = load_model(path).model(ids[:, :4]).logits[0, -1, :250]
    assert again.shape == ended.shape
    torch.testing.assert_close(again, ended, atol=1e-6, rtol=1e-6)
    assert float((untrained - ended[0, 3, :250]).abs().max()) > 1e-2


@pytest.mark.parametrize("style", ["first", "think"])
def test_a_reader_of_the_adapter_reads_where_training_put_the_decision(
    base: Path, quick: LoraSettings, trained: list, tmp_path: Path, style: str
) -> None:
    finetune(dataclasses.replace(quick, style=style, max_steps=3), base, RUNS, tmp_path / "out")
    settings = {"adapter": tmp_path / "out", "max_tokens": 1024, "max_think": 8}
    ask = DecisionReader(base, **settings)
    assert (ask.prompt, ask.tokens, ask.style) == (Prompt("decide", "{snapshot}"), DECISION_TOKENS, style)
    assert ask.fingerprint.model == "base+out"
    assert ask.fingerprint.weights != DecisionReader(base, tokens=("E", "A", "R"), max_tokens=9).fingerprint.weights
    items = list(reviewed_snapshots(RUNS))
    assert cache_logits(items, tmp_path / "store", ask).scored == 6
    logits = read_logits(FeatureStore.open(tmp_path / "store", ask.fingerprint), [shown for _, shown in items])
    alone = DecisionReader(base, **settings, batch_tokens=1).read([shown.to_json() for _, shown in items])
    np.testing.assert_allclose(alone.values[:, :3], logits, atol=1e-4)

    # The model at the end of training, on the records that it was trained on.
    [model] = trained
    records, _ = completion_records(RUNS, ask._encode, ask._tokenizer.eos_token_id, 6144)
    chosen = list(ask._encode.decisions)
    for at, record in enumerate(records):
        answer = next(place for place, label in enumerate(record["labels"]) if label in chosen)
        start, close = record["input_ids"][:answer], ask._encode.close
        assert tuple(start[len(start) - len(close) :]) == close
        with torch.no_grad():
            expected = model.eval()(torch.tensor([record["input_ids"]])).logits[0, answer - 1, chosen]
        np.testing.assert_allclose(ask._values([start])[0, :3], expected, atol=1e-5)
        if style == "first":
            np.testing.assert_allclose(logits[at], expected, atol=1e-4)


def test_prompt_tokens_carry_no_loss_and_the_answer_is_what_the_paper_says(base: Path) -> None:
    encode = encoder(base)
    tokenizer = encode._tokenizer
    records, left_out = completion_records(RUNS[:1], encode, tokenizer.eos_token_id, 6144)
    assert (len(records), left_out) == (3, [])
    for step, record in enumerate(records):
        prompt = encode(snapshot(RUNS[0], step).to_json())
        assert record["labels"][: len(prompt)] == [IGNORED] * len(prompt)
        assert record["input_ids"][: len(prompt)] == prompt
        answer = record["labels"][len(prompt) :]
        assert IGNORED not in answer
        assert record["input_ids"][len(prompt) :] == answer
        think, _, rest = tokenizer.decode(answer).partition("\n</think>\n\n")
        assert think
        token = DECISION_TOKENS[step]
        assert rest.startswith(token)
        assert rest.endswith("<|stop|>")
        payload = json.loads(rest.removeprefix(token).removesuffix("<|stop|>"))
        assert set(payload) == ({"reason", "question"} if step == Route.ASK else {"reason"})
        assert payload["reason"] == REASONS["ahj"[step]]
    first = completion_records(RUNS[:1], encoder(base, "first"), tokenizer.eos_token_id, 6144)[0][1]
    start = first["labels"].index(next(label for label in first["labels"] if label != IGNORED))
    assert first["labels"][start] == encode.decisions[Route.ASK]


def test_the_loss_is_the_mean_over_answer_tokens(base: Path) -> None:
    encode = encoder(base, "first", Prompt("", "{snapshot}"))
    records, _ = completion_records(RUNS[:1], encode, encode._tokenizer.eos_token_id, 6144)
    net = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    batch = collate(records)
    assert batch["attention_mask"].sum(1).tolist() == [len(record["input_ids"]) for record in records]
    with torch.no_grad():
        loss = float(net(**batch).loss)
        each = []
        for record in records:
            scores = net(torch.tensor([record["input_ids"]])).logits[0].log_softmax(-1)
            each += [-float(scores[at - 1, label]) for at, label in enumerate(record["labels"]) if label != IGNORED]
    assert loss == pytest.approx(np.mean(each), rel=1e-5)


def test_long_records_and_control_tokens_are_left_out_by_name(base: Path) -> None:
    encode = encoder(base, "think", Prompt("", "{snapshot}"))
    end = encode._tokenizer.eos_token_id
    long = make_trajectory("long", 1, memory="m" * 5000)
    bad = make_trajectory("bad", 1, rationales=[{"step": 0, "reason": "said </think> too"}])
    records, left_out = completion_records([*RUNS, long, bad], encode, end, 2000)
    assert len(records) == 6
    assert [name for name, _ in left_out] == ["long:0", "bad:0"]
    assert "tokens, expected at most 2000" in left_out[0][1]
    assert "</think>" in left_out[1][1]
    exact = max(len(record["input_ids"]) for record in records)
    assert not completion_records(RUNS, encode, end, exact)[1]
    assert len(completion_records(RUNS, encode, end, exact - 1)[1]) >= 1


def test_rationales_come_from_metadata_or_from_the_trigger() -> None:
    assert REASONS.keys() == TRIGGERS.keys()
    assert len(set(REASONS.values())) == 14
    built = rationales_of(RUNS[0])
    assert built[1].question == "Which of the possible targets of move do you mean?"
    assert built[0].question == built[2].question == ""
    given = make_trajectory(
        rationales=[{"step": 1, "reason": "r", "question": "q", "think": "t"}, {"step": 2, "reason": "s"}]
    )
    found = rationales_of(given)
    assert (found[1].think, found[1].reason, found[1].question) == ("t", "r", "q")
    assert json.loads(found[2].payload()) == {"reason": "s"}
    assert found[0] == built[0]
    moved = make_trajectory(reviews=[{"step": 0, "route": "ASK", "trigger": "d"}, {"step": 1, "route": "EXECUTE"}])
    assert rationales_of(moved)[0].reason.startswith(REASONS["d"])
    assert rationales_of(moved)[0].reason != REASONS["d"]
    assert rationales_of(moved)[0].question == "Should find run?"
    for broken in (
        {},
        [{"step": 0}],
        [{"step": 7, "reason": "r"}],
        [{"step": 0, "reason": 3}],
        [{"step": 0, "reason": "", "x": 1}],
    ):
        with pytest.raises(SnapshotError, match="rationales"):
            rationales_of(make_trajectory(rationales=broken))


@pytest.mark.slow
def test_bfloat16_keeps_what_is_trained_in_float32(
    base: Path, quick: LoraSettings, trained: list, tmp_path: Path
) -> None:
    settings = dataclasses.replace(quick, dtype="bfloat16", activation_checkpointing=True, max_steps=3)
    finetune(settings, base, RUNS, tmp_path / "out")
    [model] = trained
    assert {value.dtype for value in model.parameters() if value.requires_grad} == {torch.float32}
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    loaded = load_model(base, tmp_path / "out", dtype="bfloat16")
    chosen = loaded.tokenizer.convert_tokens_to_ids(list(DECISION_TOKENS))
    with torch.no_grad():
        ids = torch.tensor([[1, 2, 3, *chosen]])
        # The Trainer has put its own casts around the outer model.
        ended = model.eval().base_model(input_ids=ids).logits
        torch.testing.assert_close(loaded.model(ids).logits, ended, atol=0, rtol=0)


@pytest.mark.parametrize("rows", [320, pytest.param(261, marks=pytest.mark.slow)])
def test_a_killed_training_goes_on_to_the_same_weights_and_a_finished_one_is_left_alone(
    rows: int, quick: LoraSettings, tmp_path: Path
) -> None:
    base = make_model(tmp_path / "base", rows=rows)
    settings = dataclasses.replace(quick, dropout=0.1)
    whole = finetune(settings, base, RUNS, tmp_path / "whole")

    def kill(step: int, _loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(settings, base, RUNS, tmp_path / "killed", kill)
    (tmp_path / "killed" / "checkpoints" / "checkpoint-9").mkdir()  # cut short: no state
    report = finetune(settings, base, RUNS, tmp_path / "killed")
    assert report.resumed_from == 4
    assert report.losses == pytest.approx(whole.losses, rel=1e-6)
    from safetensors.numpy import load_file

    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=1e-6, err_msg=name)

    stamp = (tmp_path / "whole" / "adapter_model.safetensors").stat().st_mtime_ns
    assert finetune(settings, base, RUNS, tmp_path / "whole") == whole
    assert (tmp_path / "whole" / "adapter_model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(FinetuneError, match="was started with other settings; use another folder"):
        finetune(dataclasses.replace(settings, rank=8), base, RUNS, tmp_path / "whole")
    with pytest.raises(FinetuneError, match="was started with other records"):
        finetune(settings, base, RUNS[:1], tmp_path / "whole")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(FinetuneError, match="holds something else"):
        finetune(settings, base, RUNS, tmp_path / "mine")


def test_an_adapter_of_another_model_is_refused(base: Path, quick: LoraSettings, tmp_path: Path) -> None:
    finetune(dataclasses.replace(quick, max_steps=2), base, RUNS, tmp_path / "out")
    with pytest.raises(RouterModelError, match="was trained on weights"):
        load_model(make_model(tmp_path / "other", seed=1), tmp_path / "out")
    (tmp_path / "out" / "router.json").unlink()
    untied = make_model(tmp_path / "untied", tied=False)
    finetune(dataclasses.replace(quick, max_steps=2), untied, RUNS, tmp_path / "two")
    (tmp_path / "two" / "router.json").unlink()
    with pytest.raises(RouterModelError, match=r"two: has no router\.json, its training has not ended"):
        load_model(base, tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints")
    with pytest.raises(RouterModelError, match=r"is not one of this model; .* is on one side only"):
        load_model(base, tmp_path / "two")
    with pytest.raises(RouterModelError, match=r"has no adapter_config\.json"):
        load_model(base, tmp_path)


def test_too_little_to_train_on_is_said(base: Path, quick: LoraSettings, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=r"no reviewed step to train on \(0 were left out\)"):
        finetune(quick, base, [dataclasses.replace(RUNS[0], metadata={})], tmp_path / "a")
    with pytest.raises(FinetuneError, match="warmup_steps: got 150, expected fewer than the 6 steps of 6 records"):
        finetune(dataclasses.replace(quick, warmup_steps=150), base, RUNS, tmp_path / "b")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("other", [{"schedule": "nope"}, {"schedule": "reduce_lr_on_plateau"}, {"optimiser": "nope"}])
def test_a_recipe_that_cannot_be_claims_no_folder(base: Path, quick: LoraSettings, tmp_path: Path, other: Any) -> None:
    with pytest.raises(FinetuneError, match=r"^schedule '\w+', optimiser '\w+': "):
        finetune(dataclasses.replace(quick, **other), base, RUNS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_for_evaluation_only_is_not_trained_on(base: Path, quick: LoraSettings, tmp_path: Path) -> None:
    kept = make_trajectory("kept", 3, evaluation_only=True)
    with pytest.raises(EvaluationOnly, match=r"1 trajectories are for evaluation only \(e.g. 'kept'\)"):
        finetune(quick, base, [*RUNS, kept], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_in_a_folder_is_named(base: Path, quick: LoraSettings, tmp_path: Path) -> None:
    settings, out = dataclasses.replace(quick, max_steps=2), tmp_path / "out"
    finetune(settings, base, RUNS, out)
    (out / "router.json").write_text("{}")
    with pytest.raises(FinetuneError, match=rf"{out / 'router.json'} cannot be used"):
        finetune(settings, base, RUNS, out)
    (out / "router.json").unlink()
    (out / "checkpoints" / "checkpoint-2" / "optimizer.pt").write_bytes(b"cut")
    with pytest.raises(FinetuneError, match=r"stopped \(.*it began from .*checkpoint-2: where that is damaged"):
        finetune(settings, base, RUNS, out)


def test_a_record_that_json_cannot_hold_is_left_out_by_name(base: Path) -> None:
    bad = make_trajectory("bad", 1)
    bad = dataclasses.replace(bad, steps=(dataclasses.replace(bad.steps[0], arguments={"x": float("nan")}),))
    records, left_out = completion_records([bad, RUNS[0]], encoder(base), 0, 10_000)
    assert (len(records), [name for name, _ in left_out]) == (3, ["bad:0"])


def test_weights_that_are_not_finite_are_not_saved(base: Path, quick: LoraSettings, tmp_path: Path) -> None:
    wild = dataclasses.replace(quick, learning_rate=1e38)
    with pytest.raises(FinetuneError, match="is not finite"):
        finetune(wild, base, RUNS, tmp_path / "out")
    assert not (tmp_path / "out" / "router.json").exists()


def test_settings_are_the_papers_and_say_what_is_wrong(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "route_lora.yaml"
    paper = load_lora_settings(shipped)
    assert (paper.rank, paper.alpha, paper.dropout, paper.epochs, paper.max_tokens) == (16, 32, 0.05, 3, 6144)
    assert (paper.learning_rate, paper.schedule, paper.warmup_steps, paper.style) == (2e-4, "cosine", 150, "think")
    changed = load_lora_settings(shipped, ["rank=8", "tokens=[E, A, R]"])
    assert (changed.rank, changed.tokens) == (8, ("E", "A", "R"))
    for setting, message in (
        ("ranks=8", "ranks: unknown key; did you mean rank"),
        ("rank=0", "rank: got 0, expected 1 or more"),
        ("rank=x", "rank: got 'x'"),
        ("dropout=1.0", "dropout: got 1.0"),
        (f"seed={2**32}", "seed: got 4294967296, expected less than 4294967296"),
        ("style=last", "style: got 'last', expected one of first, think"),
        ("learning_rate=0.0", "learning_rate: got 0.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_lora_settings(None, [setting])
