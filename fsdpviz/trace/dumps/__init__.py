"""What a rank dumps of itself: flight recorder, allocator snapshot, and the pickles they come in."""
