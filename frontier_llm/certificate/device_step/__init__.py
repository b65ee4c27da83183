"""The step of a rank with the sizes and ops of a run, on tensors without memory: launches, waits and copies."""
