"""vLLM engines behind Ray Serve. The only place where vLLM is imported."""
