"""lm-evaluation-harness with its own client: the scores are those of transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.checkpoints import all_logits
from support.model_server import model_server
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

QUESTIONS = [
    ("The quick brown fox jumps over", ["the lazy dog", "the end!", "naïve façade"], 0),
    ("Stop here. Then", ["stop there", "the dog does not mind"], 0),
    ("Emoji take", ["several tokens each", "世界", "tab"], 1),
]
TASK = """
task: rivers
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(made, vocab_size=512)
    return save_tokenizer(made)


@pytest.fixture(scope="module")
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


def likelihood(folder: Path, question: str, choice: str) -> tuple[float, bool]:
    """(log-probability of a choice after the question, whether it is what greedy search gives)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = tokenizer(question, add_special_tokens=False).input_ids
    whole = tokenizer(f"{question} {choice}", add_special_tokens=False).input_ids
    table = torch.log_softmax(all_logits(model, whole).double(), dim=1)
    places = range(len(before) - 1, len(whole) - 1)
    total = sum(table[place, whole[place + 1]].item() for place in places)
    return total, all(int(table[place].argmax()) == whole[place + 1] for place in places)


async def with_client(folder: Path, tmp_path: Path, work: Any) -> Any:
    """What `work` gets from lm_eval's `local-completions`, on a thread."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    async with model_server(folder, tmp_path, max_batch_tokens=11, prefix_cache="lru") as server:

        def run() -> Any:
            client = completions.LocalCompletionsAPI(
                base_url=f"{server.url}/v1/completions",
                model="tiny",
                tokenizer=str(folder),
                tokenizer_backend="huggingface",
                num_concurrent=1,
                batch_size=2,
                max_length=256,
            )
            return work(client)

        return await asyncio.to_thread(run)


async def test_its_client_gets_the_log_likelihoods(
    folder: Path, tmp_path: Path, offline: None
) -> None:
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    pairs = [(question, f" {choice}") for question, choices, _ in QUESTIONS for choice in choices]
    requests = [instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found = await with_client(folder, tmp_path, lambda client: client.loglikelihood(requests))
    expected = [likelihood(folder, question, choice.strip()) for question, choice in pairs]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([v for v, _ in expected], abs=1e-3)


async def test_a_task_of_its_own_has_the_right_accuracy(
    folder: Path, tmp_path: Path, offline: None
) -> None:
    pytest.importorskip("datasets")
    evaluator = pytest.importorskip("lm_eval.evaluator")
    tasks = pytest.importorskip("lm_eval.tasks")
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rivers.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))

    def evaluate(client: Any) -> Any:
        manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
        return evaluator.simple_evaluate(
            model=client, tasks=["rivers"], task_manager=manager, bootstrap_iters=0
        )

    results = await with_client(folder, tmp_path, evaluate)
    right = 0
    for question, choices, answer in QUESTIONS:
        scores = [likelihood(folder, question, choice)[0] for choice in choices]
        right += max(range(len(scores)), key=scores.__getitem__) == answer
    assert results["results"]["rivers"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
