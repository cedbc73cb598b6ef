"""Models and complete runs that a newcomer can start by name."""
