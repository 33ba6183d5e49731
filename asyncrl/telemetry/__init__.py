"""What a run tells people: metric names, the files they go to, the live view and the summary."""
