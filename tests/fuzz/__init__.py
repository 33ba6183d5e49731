"""Schedule fuzzing: the async core on fakes, a virtual clock and a seeded order of everything that can happen next."""
