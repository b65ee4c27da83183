"""What a model is: shape, family, experts; a model file holds these keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frontier_llm.config.fields import (
    DenseLayerCount,
    ExpertCount,
    HeadCount,
    LayerCount,
    NonNegativeFloat,
    OptionalWidth,
    PositiveFloat,
    PositiveInt,
    Section,
    SequenceLength,
    VocabularySize,
    Width,
)


class RopeScaling(Section):
    """A longer context than the one that a model was trained with: rotations are slowed down, all of them or those
    that turn seldom.
    """

    kind: Literal["llama3", "linear", "ntk", "yarn"] = "llama3"  # which rotations: docs/long_context.md
    factor: PositiveFloat  # by which rotations are slowed down
    low_freq_factor: PositiveFloat = 1.0  # llama3: turns within the original context up to which a rotation is slow
    high_freq_factor: PositiveFloat = 4.0  # llama3: and from which it is fast; those between are blended
    beta_slow: PositiveFloat = 1.0  # yarn: turns within the original context up to which a rotation is slow
    beta_fast: PositiveFloat = 32.0  # yarn: and from which it is fast
    # context that the model was trained with before, in tokens; for llama3 and yarn
    original_sequence_length: SequenceLength | None = None


class MoeConfig(Section):
    """A mixture of experts in place of the MLP: each token goes to the few experts that a router chooses for it
    (docs/moe.md).
    """

    experts: Annotated[int, Field(ge=2, le=65536)]  # E, of each layer
    top_k: ExpertCount  # experts that each token goes to
    expert_hidden: Width | None = None  # width of an expert; None = ffn_hidden
    dense_layers: DenseLayerCount = 0  # first layers that keep an ordinary MLP, of ffn_hidden
    # width of the expert that every token passes beside its own ones; 0 = none
    shared_hidden: OptionalWidth = 0
    shared_gate: bool = False  # the shared expert's output is scaled by a sigmoid of the token
    score: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits, over all experts
    # a token's weights sum to 1; with softmax the same as a softmax over the chosen alone
    normalise: bool = True
    scale: PositiveFloat = 1.0  # of a token's weights, after that
    # a bias for each expert, moved towards an even load, decides who is chosen and nothing else
    selection_bias: bool = False
    bias_rate: NonNegativeFloat = 1e-3  # by which it moves after each step
    # rows over its even share that an expert takes of a rank's microbatch; None = all
    capacity: PositiveFloat | None = None
    # what the load is even over: docs/moe.md
    balance: Literal["sequence", "microbatch", "global"] = "sequence"
    # of the balance loss of each layer, logged without it as router-balance
    balance_weight: NonNegativeFloat = 0.01
    # of the mean squared log-sum-exp of the router's logits, logged as router-z
    z_weight: NonNegativeFloat = 0.0


class ModelConfig(Section):
    """The transformer's shape and family; every other room reads the architecture from here alone."""

    name: str = "custom"  # for people, and for records; the file's own name where it is a model file
    layers: LayerCount  # transformer blocks
    hidden: Width  # H, width of the residual stream
    heads: HeadCount  # A, query heads
    kv_heads: HeadCount | None = None  # key/value heads (grouped-query attention); None = heads
    head_dim: Width | None = None  # D, width of a head; None = hidden / heads
    ffn_hidden: Width  # F, width inside the MLP
    vocab_size: VocabularySize  # the tokenizer's true size; see padded_vocab_size
    vocab_multiple: VocabularySize = 128  # rows of the embedding are padded to this, whatever the layout
    sequence_length: SequenceLength  # S, the context in tokens
    # a table of vectors, rotated queries and keys, or a slope on the scores
    position: Literal["learned", "rope", "alibi"] = "rope"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"  # of every block and before the head
    norm_eps: PositiveFloat = 1e-5  # added to the variance (rmsnorm: the mean square)
    # of the MLP; the -glu have a gate and so a third matrix
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"] = "swiglu"
    bias: bool = False  # of the linear layers
    qkv_bias: bool | None = None  # of the query, key and value projection (Qwen 2 has only this one); None = bias
    norm_bias: bool = False  # of LayerNorm
    norm_plus_one: bool = False  # RMSNorm's weight is added to 1 (Gemma)
    # of what a block takes in, of what it adds (OLMo 2), or of both
    norm_placement: Literal["pre", "post", "both"] = "pre"
    # RMSNorm of queries and keys, by head (Qwen 3) or over all (OLMo)
    qk_norm: Literal["head", "full"] | None = None
    parallel_residual: bool = False  # GPT-NeoX: x + attention(norm1(x)) + mlp(norm2(x))
    tied_embeddings: bool = False  # the output head is the token embedding
    rope_theta: PositiveFloat = 10000.0  # base of the rotations' wavelengths
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of head_dim that rotates (NeoX: 0.25)
    # tokens that a query sees, itself included; None = all before it
    sliding_window: PositiveInt | None = None
    # with a window: each n-th layer sees all (Gemma 2: 2); None = none does
    full_attention_every: LayerCount | None = None
    score_width: Width | None = None  # scores are q·k over its root; None = head_dim
    # x in x tanh(score / x), attention's scores bounded softly; None = as they are
    score_softcap: PositiveFloat | None = None
    logit_softcap: PositiveFloat | None = None  # the same of the logits
    scaled_embedding: bool = False  # token embeddings times the root of hidden (Gemma)
    # share of what embedding, attention and MLP give that training zeroes
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    rope_scaling: RopeScaling | None = None  # None = rotations as trained
    alibi_max_bias: PositiveFloat = 8.0  # x in 2^(-x n / A), the slope of head n of A
    init_std: PositiveFloat = 0.02  # of normal initial weights; output projections use init_std / sqrt(2 * layers)
    moe: MoeConfig | None = None  # experts in place of the MLP; None = a dense model

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads G."""
        return self.kv_heads or self.heads

    @property
    def dim_per_head(self) -> int:
        """Head dimension D."""
        return self.head_dim or self.hidden // self.heads

    @property
    def has_qkv_bias(self) -> bool:
        """True when the query, key and value projection has a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def gated(self) -> bool:
        """True when the MLP has a gate and an up projection (SwiGLU, GeGLU)."""
        return self.activation in ("swiglu", "geglu_tanh")

    def window_of(self, layer: int) -> int:
        """Tokens that a query of this layer sees, itself included; 0 = all before it."""
        every = self.full_attention_every
        if self.sliding_window is None or (every and (layer + 1) % every == 0):
            return 0
        return self.sliding_window

    @property
    def expert_hidden(self) -> int:
        """Width of an expert."""
        return (self.moe and self.moe.expert_hidden) or self.ffn_hidden

    @property
    def routed_layers(self) -> range:
        """Layers that have experts."""
        if self.moe is None:
            return range(self.layers, self.layers)
        return range(min(self.moe.dense_layers, self.layers), self.layers)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding; rows past vocab_size exist, stay at their initial values and never enter a logit."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
