"""Step times: measured, fitted to cost models, stored and found again."""
