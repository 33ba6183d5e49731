"""SkipManager: record, replay and repeat of annotated stages."""
