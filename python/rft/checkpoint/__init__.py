"""Checkpoints: complete or invisible, safetensors and JSON only; and the folders that a run hands out."""
