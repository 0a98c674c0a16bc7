"""Scout inside vLLM: `_compat` is the only importer of vllm."""
