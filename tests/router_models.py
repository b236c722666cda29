"""Tiny random Qwen3 models with a byte tokenizer, and trajectories for a router."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxguard.types import Step, Trajectory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS = 320
SPECIAL = ["<|end|>", "<|start|>", "<|stop|>"]
PLAIN = ["<think>", "</think>"]
CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(*, chat: bool = True, think: bool = True) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, with the merges that no test text has left out."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if think:
        backend.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|stop|>", pad_token="<|end|>", padding_side="right"
    )
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def make_model(folder: Path, *, tied: bool = True, rows: int = ROWS, seed: int = 0, **tokenizer: bool) -> Path:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer(**tokenizer).save_pretrained(folder)
    return folder


def make_ready(folder: Path, **options: bool) -> Path:
    """A model that has the paper's tokens already."""
    from jaxguard.features.decision_model import add_decision_tokens
    from jaxguard.features.decision_prompt import DECISION_TOKENS

    make_model(folder, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    add_decision_tokens(model, tokenizer, DECISION_TOKENS)
    with torch.no_grad():  # distinct rows, or all three logits are one number
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for token in DECISION_TOKENS:
                generator = torch.Generator().manual_seed(len(token))
                layer.weight[tokenizer.convert_tokens_to_ids(token)] = 0.2 * torch.randn(32, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trajectory(name: str = "run", steps: int = 3, memory: str = "", **metadata: object) -> Trajectory:
    routes = ["EXECUTE", "ASK", "REFUSE"]
    reviews = [{"step": t, "route": routes[t % 3], "trigger": "ahj"[t % 3]} for t in range(steps)]
    return Trajectory(
        name,
        f"tidy {name}",
        tuple(
            Step(["find", "move", "send"][t % 3], {"file": f"{name}-{t}"}, str(t), observation="seen " * t)
            for t in range(steps)
        ),
        metadata={"memory": memory, "domain": "files", "reviews": reviews, **metadata},
    )
