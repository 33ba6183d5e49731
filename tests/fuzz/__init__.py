"""Schedule fuzzing: the async core runs on fakes and a virtual clock, and a seed determines the order of all
callbacks."""
