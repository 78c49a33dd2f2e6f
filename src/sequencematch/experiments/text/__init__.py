"""The paper's table on text generation: one base model, fine-tuned and decoded in several ways   (§6.2)."""
