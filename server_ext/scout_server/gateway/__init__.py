"""TAO in front of many OpenAI-compatible servers, as one process."""
