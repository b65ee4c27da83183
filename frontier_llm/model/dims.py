"""Meaning of the shape suffixes of tensor names. `x_sBH` is a tensor of shape (s, B, H).

S  sequence length            B  microbatch (sequences)       H  hidden
A  query heads                G  key/value heads              D  head dimension
Q  query heads per key/value head (A / G)                     R  half of the rotary dimensions
F  MLP width                  V  vocabulary                   N  tokens, S·B flattened
k  input features of a product on this rank                   o  its output features on this rank
t  ranks of the tp axis       c  positions in one piece of a product split into comm.tensor_chunks pieces

Lower case is this rank's tensor-parallel or sequence-parallel part: a = A / tp, g = G / tp, f = F / tp, v = V / tp. In
sequence-parallel regions s = S / tp. The first dim of a plain `x` is S or s, depending on the configuration.

With context parallelism, S is always the number of this rank's tokens: the sequence length / cp. K is the number of
keys that these tokens attend to.
"""
