"""Kineto JSON, from its bytes to columns of events."""
