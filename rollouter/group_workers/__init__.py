"""Worker actors that generate and score groups in place of the Rollouter's process."""
