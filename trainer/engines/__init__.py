"""Engines, which run the forward and backward passes and the optimizer of a model, without Ray and vLLM."""
