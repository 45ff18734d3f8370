"""The front end: functions whose bodies are prompts, semantic variables, and sessions."""
