"""What weights pass on their way from the trainer to the engines."""
