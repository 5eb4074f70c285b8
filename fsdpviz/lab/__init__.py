"""What a notebook calls: run and show, A/B, exercises and their checks."""
