"""Generate and score with a trained model, on any layout: the training stages themselves, fed token by token."""
