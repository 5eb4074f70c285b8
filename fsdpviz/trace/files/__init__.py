"""From what a user gives to files, and from a file to its format and rank."""
