"""Observe a run: metrics, status, health, report and timeline."""
