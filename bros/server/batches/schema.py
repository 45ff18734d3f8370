"""Wire models of files and batches: requests and responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from bros.batch.objects import Batch, StoredFile
from bros.batch.rows import ENDPOINTS
from bros.server.openai.schema import Slowdown, WireModel

MAX_METADATA = 16
MIN_LIFE_S, MAX_LIFE_S = 3600, 2_592_000

FilePurpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    reason = None
    if len(value) > MAX_METADATA:
        reason = f"must have at most {MAX_METADATA} pairs"
    elif any(len(key) > 64 for key in value):
        reason = "must have keys of at most 64 characters"
    elif any(len(text) > 512 for text in value.values()):
        reason = "must have values of at most 512 characters"
    if reason is not None:
        raise PydanticCustomError("metadata_value", "{reason}", {"reason": reason})
    return value


Metadata = Annotated[dict[str, str], AfterValidator(_check_metadata)]


class ExpiresAfter(WireModel):
    """Lifetime of a file after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)]


class CreateBatch(WireModel):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str = Field(description=f"One of {', '.join(ENDPOINTS)}")
    completion_window: str = Field(
        description="24h as in OpenAI's API, or any other number of minutes, hours or days up to "
        "30d, such as 90m. It is a deadline: batches with an earlier one run first, and rows that "
        "are not done by then expire"
    )
    rt_slowdown: Slowdown | None = Field(
        default=None,
        description="Not in OpenAI's API: beside its rows, real-time streams may take so many "
        "times as long per token as alone while the batch is on schedule. Default: rt_slowdown of "
        "the key, else --rt-slowdown",
    )
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, file: StoredFile) -> FileObject:
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=file.created_at,
            expires_at=file.expires_at,
            filename=file.filename,
            purpose=file.purpose,
        )


class FileList(BaseModel):
    """GET /v1/files"""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """DELETE /v1/files/{id}"""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchErrorObject(BaseModel):
    """An error in an input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchErrorObject]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class BatchUsage(BaseModel):
    """The sum over all rows."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchOutlook(BaseModel):
    """Not in OpenAI's API: whether a batch will be done within its window, and what was asked."""

    expected_at: int | None = Field(
        description="Expected time of completion in Unix seconds; null if unknown"
    )
    at_risk: bool = Field(description="Whether expected_at is after expires_at")
    rt_slowdown: float | None = Field(description="As given; null: the default")


class BatchObject(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    bros: BatchOutlook

    @classmethod
    def of(cls, batch: Batch) -> BatchObject:
        usage, expected_at = batch.usage, batch.expected_at
        errors = [
            BatchErrorObject(
                code=error.code, message=error.message, param=error.param, line=error.line
            )
            for error in batch.errors
        ]
        same = ("id", "endpoint", "model", "input_file_id", "output_file_id", "error_file_id")
        stamps = ("created", "in_progress", "expires", "finalizing", "completed", "failed")
        times = [f"{name}_at" for name in (*stamps, "expired", "cancelling", "cancelled")]
        return cls(
            **{name: getattr(batch, name) for name in (*same, *times)},
            errors=BatchErrors(data=errors) if errors else None,
            completion_window=batch.window,
            status=batch.status.value,
            request_counts=RequestCounts(
                total=batch.total, completed=batch.completed, failed=batch.failed
            ),
            usage=BatchUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
                output_tokens=usage.output_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
                total_tokens=usage.prompt_tokens + usage.output_tokens,
            ),
            metadata=None if batch.metadata is None else dict(batch.metadata),
            bros=BatchOutlook(
                expected_at=expected_at,
                at_risk=expected_at is not None and expected_at > batch.expires_at,
                rt_slowdown=batch.rt_slowdown,
            ),
        )


class BatchList(BaseModel):
    """GET /v1/batches"""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
