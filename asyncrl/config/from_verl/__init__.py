"""Translation of verl's configurations: `asyncrl migrate`."""
