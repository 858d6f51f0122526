"""What a run keeps in memory: the planner's byte model, and what is computed again instead of kept."""
