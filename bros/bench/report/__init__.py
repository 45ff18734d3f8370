"""The report of `bros bench`: terminal tables, JSON, CSV and HTML."""
