"""The health of a live run: `rules` evaluates measurements, `alarms` decides what is reported."""
