"""Broken and foreign model files end in one sentence before anything is served, whatever is wrong with them."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import EngineError, ModelBroken, ModelNotFound
from engine.model.llama import Llama
from engine.model.source import ModelSource, resolve
from engine.model.weights import open_weights
from engine.ops.reference import ReferenceOps
from engine.text.tokenizer import load_tokenizer
from tests.engine.test_architectures import random_model, write_gguf
from tests.engine.test_export_hf import add_vocabulary
from tests.engine.text.test_sentencepiece import describe as add_sentencepiece


@pytest.fixture(scope="module", params=[add_vocabulary, add_sentencepiece], ids=["byte-level", "sentencepiece"])
def good_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    random_model(folder / "hf", "Llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=8)
    write_gguf(folder / "hf", folder / "m.gguf", more=request.param)
    return folder / "m.gguf"


@pytest.fixture
def good(good_file: Path) -> bytes:
    return good_file.read_bytes()


def load(file: Path) -> None:
    """Everything that serving it would read."""
    source = resolve(str(file))
    Llama(open_weights(source, torch.float32), ReferenceOps(), torch.float32, 64)
    load_tokenizer(source)


damage = (
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b""))
    | st.tuples(st.just("overwrite"), st.floats(0, 1), st.binary(min_size=1, max_size=12))
    | st.tuples(st.just("head"), st.floats(0, 0.2), st.binary(min_size=1, max_size=8))
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage)
def test_a_damaged_gguf_file_is_an_error_of_ours_or_still_a_model(
    good_file: Path, tmp_path: Path, what: tuple[str, float, bytes]
) -> None:
    good = good_file.read_bytes()
    kind, where, data = what
    at = int(where * len(good))
    file = tmp_path / "bad.gguf"
    file.write_bytes(good[:at] if kind == "cut" else good[:at] + data + good[at + len(data) :])
    with contextlib.suppress(EngineError):
        load(file)


def test_the_undamaged_file_is_fine(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(good)
    load(tmp_path / "m.gguf")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"PK\x03\x04" + b"\0" * 100, b"GGUF" + b"\xff" * 1000])
def test_foreign_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises((ModelBroken, ModelNotFound), match=r"x\.gguf"):
        load(tmp_path / "x.gguf")


def test_a_gguf_of_another_byte_order_or_version_is_refused(good: bytes, tmp_path: Path) -> None:
    for version in (1, 4, struct.unpack("<I", struct.pack(">I", 3))[0]):
        (tmp_path / "x.gguf").write_bytes(good[:4] + struct.pack("<I", version) + good[8:])
        with pytest.raises(EngineError):
            load(tmp_path / "x.gguf")


def broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    broken_config(folder, json.dumps(config))


def other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    broken_config(folder, json.dumps({**config, "intermediate_size": 97}))


def index(weight_map: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return spoil


def a_tensor_less(folder: Path) -> None:
    """The index names a tensor that its shard has not."""
    tensors = load_file(folder / "model.safetensors")
    gone = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys([*tensors, "model.layers.0.mlp.up_proj.weight"], "model.safetensors")
    index(names)(folder)
    assert gone is not None


def odd_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    broken_config(folder, json.dumps({**config, "num_key_value_heads": 3}))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: broken_config(folder, "{"), "config.json"),
        (lambda folder: broken_config(folder, "[]"), "config.json"),
        (lambda folder: broken_config(folder, '{"model_type": "llama", "num_attention_heads": "four"}'), "config.json"),
        (no_layers, "num_hidden_layers"),
        (odd_shapes, "num_key_value_heads"),
        (cut_weights, "model.safetensors"),
        (other_shapes, r"'model.layers.0.mlp.gate_proj.weight' has shape"),
        (a_tensor_less, r"'model.layers.0.mlp.up_proj.weight' is missing"),
        (index({"a": "model-00001-of-00002.safetensors"}), "missing model-00001-of-00002.safetensors"),
        (index({"a": 5}), "index.json"),
        (index({"a": None}), "index.json"),
        (index([]), "index.json"),
        (index({}), "missing"),
        (index({"a": "../../../../etc/passwd"}), r"index\.json: .*passwd"),
    ],
)
def test_a_broken_folder_is_named(tmp_path: Path, spoil: Callable[[Path], None], named: str) -> None:
    random_model(tmp_path, "Llama", num_hidden_layers=1)
    spoil(tmp_path)
    with pytest.raises(EngineError, match=named):
        Llama(open_weights(ModelSource("m", "hf", tmp_path), torch.float32), ReferenceOps(), torch.float32, 64)
