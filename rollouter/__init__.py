"""Generation side: prompts, dispatch, rewards and the vLLM servers behind Ray Serve."""
