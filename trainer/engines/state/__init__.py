"""State of an engine as files: checkpoints and exports."""
