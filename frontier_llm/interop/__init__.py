"""Read and write checkpoints of Hugging Face and Megatron."""
