"""What to run, as frozen values: specs, presets, rank arithmetic, and the run folder's layout."""
