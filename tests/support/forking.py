"""Processes of tests that start within milliseconds, however much they import."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOADED = [
    "pytest",
    "psycopg",
    "bros.batch.runner",
    "bros.batch.store",
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "bros.executor.loader",
    "bros.executor.parallel.runner",
]
"""Modules that are installed: the server does not look into the folder of the tests."""


def forkserver() -> ForkServerContext:
    """Forks every process from one small process that has libraries loaded. Modules that are not
    there are loaded by none, and the process that needs one says so."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
