"""Training side: the loop, algorithms, engines and checkpoints."""
