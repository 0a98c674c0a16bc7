"""The replica in real time behind an OpenAI-compatible API: an engine without GPU or torch."""
