"""Checkpoints: complete or invisible, safetensors and JSON only; and the folders that a run hands out."""

MARK = "complete.json"
"""The completion mark of a checkpoint, written last."""
