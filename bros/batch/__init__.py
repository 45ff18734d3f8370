"""Batch jobs: files of requests that are answered in the time that is left, exactly once each."""
