"""What each span is: kind, unit, phase, step, bytes, group; and the tables derived from that."""
