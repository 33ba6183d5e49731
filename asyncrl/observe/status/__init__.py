"""The status of a run, the reasons why it waits, and its summary."""
