"""How well a run is while it runs: what is measured (`lag`, `processes`), what it means (`rules`)."""
