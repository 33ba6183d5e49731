"""The sections of the configuration. Each module has the keys of related sections and the rules between the keys."""
