"""What both arms share: errors, span labels, kinds, provenance, units. Imports nothing of fsdpviz."""
