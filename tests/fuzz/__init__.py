"""Tests that draw random cases: `make fuzz MINUTES=10 KIND=networks` draws for longer."""
