"""Stand-ins for the parts behind the ports: scripted, deterministic, on one event loop."""
