"""Batch jobs: files of requests, run best-effort, each answered exactly once."""
