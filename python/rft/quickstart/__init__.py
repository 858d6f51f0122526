"""`rft quickstart`: a real small model and real text, offline, on a laptop's CPU, in minutes."""
