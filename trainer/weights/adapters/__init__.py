"""Low-rank adapters (LoRA): merged into their base weights, and as PEFT folders."""
