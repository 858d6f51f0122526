"""What is trained beside the base weights: LoRA through PEFT."""
