"""The configuration: one frozen tree (`schema`), cross-field rules (`rules`), composition by Hydra (`compose`)."""
