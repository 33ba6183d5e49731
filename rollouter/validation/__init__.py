"""Validation during a run (`validator`), and all validation sets once (`evaluation`)."""
