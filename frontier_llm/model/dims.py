"""Legend of the shape suffixes; read `x_sBH` as a tensor of shape (s, B, H).

S  sequence length            B  microbatch (sequences)       H  hidden
A  query heads                G  key/value heads              D  head dimension
Q  query heads per key/value head (A / G)                     R  half of the rotary dimensions
F  MLP width                  V  vocabulary                   N  tokens, S·B flattened
k  input features of a product, this rank's                   o  its output features, this rank's
t  ranks of the tp axis       c  positions in one piece of a product cut in comm.tensor_chunks

Lower case is this rank's tensor- or sequence-parallel part: a = A / tp, g = G / tp, f = F / tp, v = V / tp, and
s = S / tp inside sequence-parallel regions. A plain `x` is S or s long, whichever the configuration makes it.

With context parallelism S is this rank's tokens, the sequence / cp, throughout; K is the keys that they are scored
against.
"""
