"""TAO in front of N OpenAI-compatible servers, in one process."""
