"""One replica: a vLLM engine with token-exact generation and live weight updates."""
