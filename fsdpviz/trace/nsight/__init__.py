"""Nsight Systems' SQLite exports."""
