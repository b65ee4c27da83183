"""Data pipeline: text, tokens, `.bin/.idx` files, samples, and the microbatches of a rank.

Other packages use `loader` (open_batches, data_problems), `tokenizer` (load_tokenizer) and `meta` (read_meta). This
module imports nothing, so that tokenization workers start fast.
"""
