"""What a rank records while it trains. Runs inside ranks only."""
