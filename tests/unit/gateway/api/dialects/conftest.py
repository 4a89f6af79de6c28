"""What is known of a model without prompts."""
