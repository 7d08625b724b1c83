"""Allreduce and pipeline schedules as text and pictures, and commands that show and check them."""
