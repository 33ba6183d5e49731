"""The sections of the configuration: each module has the keys of a section and the rules between them."""
