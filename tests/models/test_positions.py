"""How long a text the model was trained for, from its config."""

from __future__ import annotations

import json

import pytest
from gguf import GGUFWriter

from rft.config.model import ModelConfig
from rft.models.positions import max_positions


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "llama", "max_position_embeddings": 512}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        (
            {"model_type": "gemma3", "text_config": {"max_position_embeddings": 4096}, "max_position_embeddings": 7},
            4096,
        ),
        ({"model_type": "llama"}, 2048),  # what the architecture's own config says
        ({"model_type": "mamba"}, None),
    ],
)
def test_positions_of_a_directory(tmp_path, config, wanted):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert max_positions(ModelConfig(path=str(tmp_path))) == wanted


def test_directory_without_a_config_names_no_limit(tmp_path):
    assert max_positions(ModelConfig(path=str(tmp_path))) is None


def test_positions_of_a_gguf_file(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(777)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert max_positions(ModelConfig(path=str(tmp_path / "m.gguf"))) == 777
