"""The training side: the loop, algorithms, engines and checkpoints."""
