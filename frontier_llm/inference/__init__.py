"""Generate text and score tokens with a trained model on any layout. The training stages run token by token."""
