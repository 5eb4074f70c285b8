"""Files read through one door: in parallel, through the cache, with a bar."""
