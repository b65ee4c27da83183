"""Text -> tokens -> `.bin/.idx` -> samples -> this rank's microbatches; the position in a run is one integer.

Rooms above use `loader` (open_batches, data_problems), `tokenizer` (load_tokenizer) and `meta` (read_meta). Nothing is
imported here, so that tokenization workers start light.
"""
