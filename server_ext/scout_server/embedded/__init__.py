"""The replica model in real time behind an OpenAI-compatible API: no GPU, no torch."""
