"""The paper's tables and figures on question-and-answer tasks: one base model, fine-tuned in many ways."""
