"""The versioned weight store between Trainer and engines: publish and pull, never push."""
