"""The model being trained: forward, backward, optimizer. Runs under plain python: no Ray, no vLLM."""
