"""Causal language models as routers: loading one with its adapter, and giving it decision tokens.

Nothing is downloaded. PyTorch, transformers and PEFT are imported where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxguard.features.decision_prompt import Prompt
from jaxguard.features.fingerprint import hash_files, tokenizer_files
from jaxguard.types import JaxguardError

DTYPES = ("float32", "bfloat16", "float16")
ADAPTER_FILE = "adapter_config.json"
ROUTER_FILE = "router.json"
"""Beside an adapter: the prompt, tokens and style that it was trained with, and the hash of the model below it."""
IDENTITY_FILE = "checkpoints/identity.json"
"""Within an adapter's folder: what its training was started with."""


class RouterModelError(JaxguardError):
    """A model, its tokenizer or its adapter cannot be used; the message names the folder."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to run.

    Attributes:
        model: The transformers model, or the PEFT model around it; in evaluation mode.
        tokenizer: Its tokenizer, the adapter's where that has one.
        weights: Hash of the weights, configurations and tokenizer that were loaded.
        device: Where it is.
    """

    model: Any
    tokenizer: Any
    weights: str
    device: str


def weights_hash(path: Path) -> str:
    """Hash of a model folder's weights and configuration, without its tokenizer.

    Raises:
        RouterModelError: There are none.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files or not (path / "config.json").is_file():
        raise RouterModelError(f"model {path}: expected a folder with config.json and *.safetensors")
    return hash_files([*files, path / "config.json"])


def load_model(path: Path, adapter: Path | None = None, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load a causal language model and, if given, a LoRA adapter onto it.

    Args:
        path: Folder with ``config.json``, ``*.safetensors`` and a tokenizer.
        adapter: Folder that PEFT saved, e.g. by :func:`jaxguard.training.lora.finetune`.
        dtype: Weights and arithmetic of the model: ``"float32"``, ``"bfloat16"`` or ``"float16"``; an adapter's own
            weights are kept in float32.
        device: PyTorch device.

    Raises:
        RouterModelError: A package is not installed, a folder lacks something, the adapter is not one of this
            model, or the device is not there.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise RouterModelError(f"router model: {error.name} is not installed; pip install 'jaxguard[torch]'") from error
    if dtype not in DTYPES:
        raise RouterModelError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    hashes = [weights_hash(path)]
    if adapter is not None and (base := read_router_file(adapter).get("base", hashes[0])) != hashes[0]:
        raise RouterModelError(f"adapter {adapter}: was trained on weights {base}, got {path} with {hashes[0]}")
    own_tokenizer = adapter is not None and (adapter / "tokenizer.json").is_file()
    tokenizer_folder = adapter if adapter is not None and own_tokenizer else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
        read: Any = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
        )
        model, loading = read[0].eval().to(device), read[1]
    except Exception as error:  # damaged configurations and absent devices raise nearly anything
        raise RouterModelError(f"model {path}: cannot be loaded on {device!r} ({_told(error)})") from error
    # transformers fills what a checkpoint lacks with random numbers.
    if absent := sorted(loading["missing_keys"]):
        raise RouterModelError(f"model {path}: lacks {len(absent)} tensors, the first is {absent[0]}")
    # What a folder says of sampling, penalties or lengths does not belong into greedy text.
    model.generation_config = GenerationConfig()
    if adapter is not None:
        widen(model, vocabulary_size(tokenizer))
        model = _with_adapter(model, adapter)
        hashes.append(hash_files([*adapter.glob("adapter_*.safetensors"), adapter / ADAPTER_FILE]))
    hashes.append(hash_files([*tokenizer_files(tokenizer_folder), *tokenizer_folder.glob("chat_template.jinja")]))
    return LoadedModel(model, tokenizer, "-".join(hashes), device)


def _with_adapter(model: Any, adapter: Path) -> Any:
    try:
        from peft import PeftModel, get_peft_model_state_dict
        from peft.tuners.trainable_tokens import TrainableTokensLayer
        from peft.utils import load_peft_weights
    except ImportError as error:
        raise RouterModelError(
            f"adapter {adapter}: {error.name} is not installed; pip install 'jaxguard[lora]'"
        ) from error
    if not (adapter / ADAPTER_FILE).is_file():
        raise RouterModelError(f"adapter {adapter}: has no {ADAPTER_FILE}, expected a folder that PEFT saved")
    try:
        adapted = PeftModel.from_pretrained(model, str(adapter), local_files_only=True).eval()
        saved = set(load_peft_weights(str(adapter), device="cpu"))
    except Exception as error:  # as above
        raise RouterModelError(f"adapter {adapter}: cannot be loaded onto this model ({_told(error)})") from error
    # PEFT only warns of weights that do not find their place, or of places that find no weights.
    if other := saved ^ set(get_peft_model_state_dict(adapted, save_embedding_layers=False)):
        raise RouterModelError(f"adapter {adapter}: is not one of this model; {sorted(other)[0]} is on one side only")
    # Otherwise each call would copy the whole embedding to put in a few rows; the values are the same.
    for module in adapted.modules():
        if isinstance(module, TrainableTokensLayer):
            module.merge()
    return adapted


def _told(error: Exception) -> str:
    """Kind and message of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def read_router_file(adapter: Path) -> dict[str, Any]:
    """What an adapter was trained with (``prompt``, ``tokens``, ``style``, ``base``, ...); empty without such a file.

    Raises:
        RouterModelError: The file is damaged, or the adapter's training has not ended.
    """
    path = adapter / ROUTER_FILE
    if not path.is_file():
        if (adapter / IDENTITY_FILE).is_file():  # what it was trained with is not known: a default would be a guess
            raise RouterModelError(
                f"adapter {adapter}: has no {ROUTER_FILE}, its training has not ended; run `jaxguard route finetune` "
                "again, it goes on where it stopped"
            )
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        prompt, tokens = Prompt(**values["prompt"]), tuple(values["tokens"])
        if not all(isinstance(token, str) for token in tokens):
            raise TypeError(f"tokens: got {tokens!r:.80}, expected texts")
        return {**values, "prompt": prompt, "tokens": tokens, "style": values["style"], "base": values["base"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError, JaxguardError) as error:
        raise RouterModelError(f"{path}: damaged ({error!r}), expected prompt, tokens, style and base") from error


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the tokenizer's largest id."""
    return int(max(tokenizer.get_vocab().values())) + 1


def widen(model: Any, rows: int) -> None:
    """Give the model's embedding at least ``rows`` rows; new ones are the mean of those before. Never shrinks.

    Models come with spare rows (Qwen3: 151,936 for 151,669 tokens); resizing to the tokenizer's length would cut them.
    """
    before = model.get_input_embeddings().weight.shape[0]
    if rows > before:
        model.resize_token_embeddings(rows, mean_resizing=False)
        _fill_rows(model, range(before, rows), before)


def add_decision_tokens(model: Any, tokenizer: Any, tokens: Sequence[str]) -> None:
    """Make each of ``tokens`` one token of tokenizer and model (Safety Sentry, section 3.3).

    Rows of new tokens are the mean of the rows of the tokenizer's other tokens, in the embedding and, where it is
    not tied to it, in the head: no decision is likelier than another before training. Spare rows are used first.
    Tokens that are there keep their rows.

    Raises:
        RouterModelError: The model has no head over the vocabulary.
    """
    from transformers import AddedToken

    if model.get_output_embeddings() is None:
        raise RouterModelError(f"model {type(model).__name__}: has no head over the vocabulary")
    before, known = vocabulary_size(tokenizer), tokenizer.get_vocab()
    new = [token for token in tokens if token not in known]
    if not new:
        return
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in new], special_tokens=True)
    widen(model, vocabulary_size(tokenizer))
    _fill_rows(model, tokenizer.convert_tokens_to_ids(new), before)


def _fill_rows(model: Any, rows: Sequence[int], before: int) -> None:
    """Set ``rows`` of embedding and head to the mean of the first ``before`` rows."""
    import torch

    at = list(rows)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            weight = layer.weight
            weight[at] = weight[:before].float().mean(0).to(weight.dtype)
            if getattr(layer, "bias", None) is not None:
                layer.bias[at] = layer.bias[:before].float().mean().to(weight.dtype)
