"""Hugging Face models on a tiny random Qwen3 and a tiny BERT made here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxguard.config import EncoderConfig
from jaxguard.features.encoder import load_encoder
from jaxguard.features.hf import HFEncoder
from jaxguard.types import JaxguardError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)
LAYERS = 4
TEXTS = ["read the ledger", "send it to the auditor now", "", "a", "the ledger of the auditor " * 12]


def _save_tokenizer(folder: Path, padding_side: str, special: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3}
    for word in ["read", "the", "ledger", "send", "it", "to", "auditor", "now", "a", "of"]:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side=padding_side
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="12KB")
    _save_tokenizer(folder, "left", special=False)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    transformers.BertModel(config).save_pretrained(folder)
    _save_tokenizer(folder, "right", special=True)
    return folder


def _reference(folder: Path, text: str, layer: int, dtype: str = "float32") -> np.ndarray:
    """Mean of hidden_states[layer] of the whole model on one text alone."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1
    return states[layer][0].float().mean(0).numpy()


@pytest.mark.parametrize("layer", range(LAYERS + 1))
@pytest.mark.parametrize("kind", ["qwen", "bert"])
def test_layer_is_the_index_into_hidden_states(kind: str, layer: int, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    got = HFEncoder(folder, layer=layer, max_tokens=64).encode([TEXTS[1]])[0]
    np.testing.assert_allclose(got, _reference(folder, TEXTS[1], layer), atol=1e-5)
    for other in range(LAYERS + 1):
        if other != layer:
            assert np.abs(got - _reference(folder, TEXTS[1], other)).max() > 1e-2


@pytest.mark.parametrize("kind", ["qwen", "bert"])
@pytest.mark.parametrize("layer", [2, LAYERS])
def test_batched_equals_single(kind: str, layer: int, request: pytest.FixtureRequest) -> None:
    encoder = HFEncoder(request.getfixturevalue(kind), layer=layer, max_tokens=40, batch_tokens=128)
    together = encoder.encode(TEXTS)
    assert together.dtype == np.float32
    assert not together[2].any()
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(encoder.encode([text])[0], vector)
        np.testing.assert_allclose(encoder.encode([text], live=True)[0], vector, atol=2e-6)


def test_windows_are_pooled_by_their_tokens(qwen: Path) -> None:
    words = TEXTS[4].split()
    expected, count = np.zeros(32), 0
    for start in range(0, len(words), 20):
        window = words[start : start + 20]
        expected += _reference(qwen, " ".join(window), 2) * len(window)
        count += len(window)
    got = HFEncoder(qwen, layer=2, max_tokens=20).encode([TEXTS[4]])[0]
    np.testing.assert_allclose(got, expected / count, atol=1e-5)


def test_weights_in_several_files_are_loaded_and_hashed(qwen: Path, tmp_path: Path) -> None:
    assert len(list(qwen.glob("*.safetensors"))) > 2
    one = tmp_path / "one"
    transformers.AutoModelForCausalLM.from_pretrained(qwen).save_pretrained(one)
    _save_tokenizer(one, "right", special=False)
    assert len(list(one.glob("*.safetensors"))) == 1
    sharded, single = (HFEncoder(folder, layer=2, max_tokens=64) for folder in (qwen, one))
    # The two tokenizers pad on different sides, which must not matter either.
    np.testing.assert_array_equal(sharded.encode(TEXTS), single.encode(TEXTS))
    assert (sharded.fingerprint.model, single.fingerprint.model) == ("tiny-qwen3", "one")
    assert sharded.fingerprint.weights != single.fingerprint.weights
    again = HFEncoder(qwen, layer=2, max_tokens=64, model_id="named")
    assert again.fingerprint.weights == sharded.fingerprint.weights
    assert again.fingerprint.model == "named"


def test_only_the_needed_layers_are_kept(qwen: Path) -> None:
    def parameters(layer: int) -> int:
        return sum(p.numel() for p in HFEncoder(qwen, layer=layer, max_tokens=64)._model.layers.parameters())

    one_layer = parameters(LAYERS) // LAYERS
    # The layer behind the wanted one is kept to stop at, but never run.
    assert [parameters(layer) // one_layer for layer in range(LAYERS + 1)] == [1, 2, 3, 4, 4]


def test_bfloat16_is_close_and_named(qwen: Path) -> None:
    exact = HFEncoder(qwen, layer=3, max_tokens=64)
    rough = HFEncoder(qwen, layer=3, max_tokens=64, dtype="bfloat16")
    assert exact.fingerprint.differences(rough.fingerprint) == "dtype: float32 != bfloat16"
    one, two = exact.encode(TEXTS[:2]), rough.encode(TEXTS[:2])
    assert two.dtype == np.float32
    cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
    assert (cosine > 0.99).all()
    assert np.abs(one - two).max() > 1e-4
    np.testing.assert_allclose(two[0], _reference(qwen, TEXTS[0], 3, "bfloat16"), atol=0.1)


def test_the_qwen_preset_reads_layer_31_of_a_given_folder(qwen: Path) -> None:
    with pytest.raises(JaxguardError, match=r"layer: got 31, expected 0\.\.4"):
        load_encoder(EncoderConfig("qwen3-4b-instruct-2507", path=str(qwen), max_tokens=64))
    encoder = load_encoder(EncoderConfig("qwen3-4b-instruct-2507", path=str(qwen), layer=2, max_tokens=64))
    assert encoder.fingerprint.model == "qwen3-4b-instruct-2507"
    assert (encoder.dim, encoder.fingerprint.dtype) == (32, "bfloat16")


def test_non_finite_results_are_an_error(qwen: Path) -> None:
    encoder = HFEncoder(qwen, layer=2, max_tokens=64)
    with torch.no_grad():
        encoder._model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(JaxguardError, match="the model gave NaN or infinity in float32"):
        encoder.encode(["read"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": -1}, r"layer: got -1, expected 0\.\.4"),
        ({"layer": 5}, r"layer: got 5, expected 0\.\.4"),
        ({"layer": 1, "dtype": "int8"}, "dtype: got 'int8'"),
        ({"layer": 1, "max_tokens": 4096}, "max_tokens: got 4096, expected at most 128"),
        ({"layer": 1, "device": "nowhere"}, "cannot be loaded on 'nowhere'"),
    ],
)
def test_arguments_out_of_range_say_so(qwen: Path, arguments: dict, message: str) -> None:
    with pytest.raises(JaxguardError, match=message):
        HFEncoder(qwen, **{"max_tokens": 64, **arguments})


def test_folders_without_a_usable_model(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(JaxguardError, match=r"has no \*\.safetensors"):
        HFEncoder(tmp_path, layer=1)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    with pytest.raises(JaxguardError, match="cannot be loaded"):
        HFEncoder(tmp_path, layer=1)
    _save_tokenizer(tmp_path, "right", special=False)
    with pytest.raises(JaxguardError, match="cannot be loaded"):
        HFEncoder(tmp_path, layer=1)
    config = json.loads((qwen / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    with pytest.raises(JaxguardError, match="cannot be loaded"):
        HFEncoder(tmp_path, layer=1)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(bert: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "part"
    shutil.copytree(bert, folder)
    tensors = load_file(bert / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JaxguardError, match=f"lacks 1 tensors, the first is {name}"):
        HFEncoder(folder, layer=2, max_tokens=64)


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from jaxguard.features.hf import HFEncoder\n"
        "HFEncoder(Path('x'), layer=1)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "pip install 'jaxguard[torch]'" in run.stderr.splitlines()[-1]
