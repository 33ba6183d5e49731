"""Predict how long a run would take, and what would wait for what, without starting it (`asyncrl simulate`)."""
