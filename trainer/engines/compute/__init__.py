"""Forward and backward passes: packing, attention, adapters, optimizers."""
