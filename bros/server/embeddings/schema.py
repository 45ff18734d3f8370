"""Wire models of embeddings (OpenAI's), scores (vLLM's) and rerank (Jina's and Cohere's)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from bros.server.openai.schema import FalseByDefault, Int, Prompts, ServiceFields, WireModel

MAX_INPUTS = 2048
"""Most texts of a request, as in OpenAI's API."""


def _check_texts(value: object) -> list[str]:
    """One text or several, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    raise PydanticCustomError("texts_type", "must be a string or a list of strings, not empty")


def _check_documents(value: object) -> list[str]:
    """Documents are strings, or objects with a `text`."""
    if isinstance(value, list) and value:
        texts: list[Any] = [i.get("text") if isinstance(i, dict) else i for i in value]
        if all(isinstance(text, str) for text in texts):
            return texts
    raise PydanticCustomError(
        "documents_type", "must be a list of strings or of objects with a text, not empty"
    )


_STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_DOCUMENT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

Texts = Annotated[
    Any, PlainValidator(_check_texts), WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]})
]
Documents = Annotated[
    Any,
    PlainValidator(_check_documents),
    WithJsonSchema(
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _DOCUMENT]}, "minItems": 1}
    ),
]


class PoolingRequest(ServiceFields):
    """Common fields of all requests here."""

    truncate_prompt_tokens: Int | None = Field(
        None,
        description="Cut longer texts to so many tokens, -1: to the longest that the model takes. "
        "By default longer texts are refused",
    )
    allow_special_tokens: FalseByDefault = Field(
        default=False,
        description="Whether parts of texts that read like special tokens of the model, such as "
        "[SEP], become these tokens. By default they stay text",
    )


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings"""

    input: Prompts = Field(description="A text or its token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = Field(
        None, description="Cut embeddings to so many numbers, if the model was trained for it"
    )


class ScoreRequest(PoolingRequest):
    """POST /v1/score: each text_1 with each text_2 if there is one text_1, else in pairs."""

    text_1: Texts
    text_2: Texts


class RerankRequest(PoolingRequest):
    """POST /v1/rerank"""

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="0: all documents")
    return_documents: bool | None = Field(None, description="true by default")


# ---- Responses. Long ones are written in calls.py.


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(
        description="base64: the numbers in fp32, least significant byte first"
    )


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankDocument(BaseModel):
    text: str


class RerankResult(WireModel):
    index: int = Field(description="Of the document in the request")
    document: RerankDocument | None
    relevance_score: float


class RerankReply(BaseModel):
    id: str
    model: str
    results: list[RerankResult] = Field(description="The most relevant document first")
    usage: PoolingUsage
