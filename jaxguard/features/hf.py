"""Any Hugging Face causal or encoder model folder as an encoder, through PyTorch and transformers.

Nothing is downloaded. ``layer`` indexes transformers' ``hidden_states``: 0 is the embedding output, k the
output of the k-th layer, and the last one stands behind the model's final norm. Only the layers that are
needed are kept and run. Batches are padded on the right whatever the tokenizer says, and pooled under the
mask, so that padding does not change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxguard.features.encoder import OnWindows
from jaxguard.features.fingerprint import EncoderFingerprint, hash_files, tokenizer_files
from jaxguard.features.windows import Shapes, Windower, pool_texts
from jaxguard.types import JaxguardError

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16", "float16")
_FIRST_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192)


class _Reached(Exception):
    """Ends the forward pass at the layer that is wanted."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class HFEncoder:
    """A Hugging Face model as an encoder; see :class:`jaxguard.features.encoder.Encoder`.

    Attributes:
        fingerprint: With the hash of all ``*.safetensors`` and of the tokenizer's files.
        dim: The model's hidden size.
    """

    def __init__(
        self,
        path: Path,
        *,
        layer: int,
        model_id: str | None = None,
        max_tokens: int = 512,
        dtype: str = "float32",
        device: str = "cpu",
        batch_tokens: int = 4096,
    ) -> None:
        """Load the model in ``path``.

        Args:
            path: Folder with ``config.json``, ``*.safetensors`` (one or many) and a fast tokenizer.
            layer: Hidden state that is pooled.
            model_id: Name in the fingerprint; the folder's name by default.
            max_tokens: Tokens of one window, special tokens included.
            dtype: Weights and arithmetic: ``"float32"``, ``"bfloat16"`` or ``"float16"``; sums over tokens
                are float32.
            device: PyTorch device.
            batch_tokens: Tokens of a full batch.

        Raises:
            JaxguardError: PyTorch or transformers is not installed; no usable model in ``path``; an
                argument out of range; the device is not there.
        """
        try:
            import torch
            from safetensors import SafetensorError
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise JaxguardError(
                f"encoder for Hugging Face models: {error.name} is not installed; pip install 'jaxguard[torch]'"
            ) from error
        if dtype not in _DTYPES:
            raise JaxguardError(f"encoder dtype: got {dtype!r}, expected one of {_DTYPES}")
        weights = sorted(path.glob("*.safetensors"))
        if not weights:
            raise JaxguardError(f"encoder path: {path} has no *.safetensors, expected a Hugging Face model folder")
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            model, loading = AutoModel.from_pretrained(
                path,
                local_files_only=True,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                output_loading_info=True,
            )
            model = model.eval().to(device)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise JaxguardError(f"encoder path: {path} cannot be loaded on {device!r} ({error})") from error
        # transformers fills what a checkpoint lacks with random numbers; a pooler is not used here.
        absent = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))
        if absent:
            raise JaxguardError(f"encoder path: {path} lacks {len(absent)} tensors, the first is {absent[0]}")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise JaxguardError(f"encoder path: {path} has no fast tokenizer (tokenizer.json)")
        layers = _layer_list(model, path)
        if not 0 <= layer <= len(layers):
            raise JaxguardError(f"encoder layer: got {layer}, expected 0..{len(layers)} for {path}")
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and max_tokens > positions:
            raise JaxguardError(f"encoder max_tokens: got {max_tokens}, expected at most {positions} for {path}")
        if layer < len(layers):
            # hidden_states[layer] is what layer number `layer` is given; nothing behind it has to run.
            layers[layer].register_forward_pre_hook(_stop, with_kwargs=True)
            del layers[layer + 1 :]
        self.fingerprint = EncoderFingerprint(
            model=model_id or path.resolve().name,
            weights=hash_files([*weights, *tokenizer_files(path)]),
            layer=layer,
            pooling="mean",
            dtype=dtype,
            max_tokens=max_tokens,
            chunking="windows",
        )
        self.dim = int(model.config.hidden_size)
        self._torch, self._model, self._device = torch, model, device
        self._windower = Windower(backend, max_tokens)
        lengths = {*(length for length in _FIRST_LENGTHS if length < max_tokens), max_tokens}
        lengths |= {length for length in range(256, max_tokens, 128)}
        self._shapes = Shapes(tuple(sorted(lengths)), batch_tokens)

    def encode(self, texts: Sequence[str], on_windows: OnWindows | None = None, *, live: bool = False) -> np.ndarray:
        """See :meth:`jaxguard.features.encoder.Encoder.encode`.

        Raises:
            JaxguardError: The model gave NaN or infinity (float16 overflows in some models).
        """
        return pool_texts(texts, self._windower, self._run, self._shapes, self.dim, on_windows, live)

    def _run(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.from_numpy(ids).to(self._device, torch.long)
            mask = torch.arange(ids.shape[1], device=self._device) < torch.from_numpy(lengths).to(self._device)[:, None]
            # A row of padding alone would give softmax nothing to attend to; one token is let through.
            attended = mask.clone()
            attended[:, 0] = True
            hidden = self._hidden(tokens, attended)
            sums = torch.where(mask[:, :, None], hidden.float(), 0.0).sum(dim=1).cpu().numpy()
        if not np.isfinite(sums[lengths > 0]).all():
            raise JaxguardError(
                f"encoder {self.fingerprint}: the model gave NaN or infinity in {self.fingerprint.dtype}; "
                "try another dtype"
            )
        return sums

    def _hidden(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """hidden_states[layer], [R, L, E]."""
        try:
            output = self._model(input_ids=tokens, attention_mask=mask.long(), **self._no_cache())
        except _Reached as reached:
            return reached.hidden
        return output.last_hidden_state

    def _no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if getattr(self._model.config, "use_cache", None) is not None else {}


def _stop(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs["hidden_states"])


def _layer_list(model: Any, path: Path) -> Any:
    """The module list that holds the model's layers.

    Raises:
        JaxguardError: There is not exactly one list of the configured length.
    """
    import torch

    count = getattr(model.config, "num_hidden_layers", None)
    lists = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and name.count(".") <= 2
    ]
    if len(lists) != 1:
        raise JaxguardError(
            f"encoder path: {path} has {len(lists)} lists of {count} layers, expected one (a plain causal or "
            "encoder model)"
        )
    return lists[0]
