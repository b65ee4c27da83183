"""Configuration of a model: shape, architecture variants and experts. A model file holds these keys."""

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
    """Extends the context beyond the length that the model was trained with, by slowing down the rotations of queries
    and keys (RoPE). Depending on `kind`, all rotations are slowed down or only the slow ones.
    """

    # Which rotations are slowed down: docs/long_context.md.
    kind: Literal["llama3", "linear", "ntk", "yarn"] = "llama3"
    factor: PositiveFloat  # Factor by which rotations are slowed down.
    # llama3: a rotation with at most this many turns in the original context is slowed down by `factor`.
    low_freq_factor: PositiveFloat = 1.0
    # llama3: a rotation with at least this many turns keeps its speed; rotations in between are slowed down less than
    # by `factor`.
    high_freq_factor: PositiveFloat = 4.0
    # yarn: rotations with at most this many turns in the original context are slowed down by `factor`.
    beta_slow: PositiveFloat = 1.0
    beta_fast: PositiveFloat = 32.0  # yarn: rotations with at least this many turns keep their speed.
    # Context that the model was trained with before, in tokens; required for llama3 and yarn.
    original_sequence_length: SequenceLength | None = None


class MoeConfig(Section):
    """Mixture of experts in place of the MLP. A router sends each token to a few experts (docs/moe.md)."""

    experts: Annotated[int, Field(ge=2, le=65536)]  # E, number of experts of each layer.
    top_k: ExpertCount  # Number of experts that process each token.
    expert_hidden: Width | None = None  # Width of an expert; None = ffn_hidden.
    dense_layers: DenseLayerCount = 0  # Number of first layers that keep an ordinary MLP of width ffn_hidden.
    # Width of the shared expert, which processes every token; 0 = no shared expert.
    shared_hidden: OptionalWidth = 0
    shared_gate: bool = False  # Scale the shared expert's output by a sigmoid gate of the token.
    score: Literal["softmax", "sigmoid"] = "softmax"  # Function of the router's logits, over all experts.
    # Scale a token's weights so that they sum to 1; with softmax this equals a softmax over the chosen experts.
    normalise: bool = True
    scale: PositiveFloat = 1.0  # Factor of a token's weights, applied after normalisation.
    # Add a bias for each expert to the scores that choose the experts; training moves it towards an even load.
    selection_bias: bool = False
    bias_rate: NonNegativeFloat = 1e-3  # Step size of the selection bias.
    # Largest number of a microbatch's tokens that one expert takes from a rank, relative to an even distribution; None
    # = no limit.
    capacity: PositiveFloat | None = None
    # Set of tokens over which the load of the experts is balanced: docs/moe.md.
    balance: Literal["sequence", "microbatch", "global"] = "sequence"
    # Weight of each layer's balance loss; the log has the loss without this weight as router-balance.
    balance_weight: NonNegativeFloat = 0.01
    # Weight of the mean squared log-sum-exp of the router's logits, which is logged as router-z.
    z_weight: NonNegativeFloat = 0.0


class ModelConfig(Section):
    """Shape and architecture of the transformer."""

    name: str = "custom"  # Name in messages and records; default for a model file: the file's name.
    layers: LayerCount  # Number of transformer blocks.
    hidden: Width  # H, width of the residual stream.
    heads: HeadCount  # A, number of query heads.
    kv_heads: HeadCount | None = None  # Number of key/value heads (grouped-query attention); None = heads.
    head_dim: Width | None = None  # D, width of a head; None = hidden / heads.
    ffn_hidden: Width  # F, width inside the MLP.
    vocab_size: VocabularySize  # Size of the tokenizer's vocabulary, without padding.
    # The embedding's rows are padded to a multiple of this number, for every layout.
    vocab_multiple: VocabularySize = 128
    sequence_length: SequenceLength  # S, the context in tokens.
    # Learned table of vectors, rotated queries and keys, or a linear slope added to the scores.
    position: Literal["learned", "rope", "alibi"] = "rope"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"  # Normalisation in every block and before the output head.
    norm_eps: PositiveFloat = 1e-5  # Added to the variance (rmsnorm: the mean square).
    # Activation of the MLP; swiglu and geglu have a gate and therefore a third matrix.
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"] = "swiglu"
    bias: bool = False  # True: the linear layers have biases.
    qkv_bias: bool | None = None  # Bias in the query, key and value projection (Qwen 2 has only this one); None = bias.
    norm_bias: bool = False  # True: LayerNorm has a bias.
    norm_plus_one: bool = False  # True: RMSNorm multiplies by 1 + weight (Gemma).
    # Normalise the input of each sub-layer (pre), its output (post, OLMo 2), or both.
    norm_placement: Literal["pre", "post", "both"] = "pre"
    # RMSNorm of queries and keys, of each head (Qwen 3) or over all heads (OLMo).
    qk_norm: Literal["head", "full"] | None = None
    parallel_residual: bool = False  # GPT-NeoX: x + attention(norm1(x)) + mlp(norm2(x)).
    tied_embeddings: bool = False  # The output head shares the weights of the token embedding.
    rope_theta: PositiveFloat = 10000.0  # Base of the wavelengths of the rotations.
    # Share of head_dim to which the rotation is applied (NeoX: 0.25).
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    # Number of tokens that a query attends to, itself included; None = all tokens up to itself.
    sliding_window: PositiveInt | None = None
    # With a sliding window: every n-th layer attends to all tokens (Gemma 2: n = 2); None = no layer attends to all.
    full_attention_every: LayerCount | None = None
    score_width: Width | None = None  # Scores are q·k divided by the square root of this width; None = head_dim.
    # c in c tanh(score / c), a soft bound of attention's scores; None = no bound.
    score_softcap: PositiveFloat | None = None
    logit_softcap: PositiveFloat | None = None  # The same soft bound for the logits.
    scaled_embedding: bool = False  # Multiply token embeddings by the square root of hidden (Gemma).
    # Share of the outputs of embedding, attention and MLP that training sets to zero (dropout rate).
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    rope_scaling: RopeScaling | None = None  # Slower rotations for a longer context; None = rotations as trained.
    alibi_max_bias: PositiveFloat = 8.0  # b in 2^(-b n / A), the slope of head n of A.
    # Standard deviation of the initial weights; output projections use init_std / sqrt(2 * layers).
    init_std: PositiveFloat = 0.02
    moe: MoeConfig | None = None  # Experts in place of the MLP; None = a dense model.

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def dim_per_head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def has_qkv_bias(self) -> bool:
        """True if the query, key and value projection has a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate and an up projection (SwiGLU, GeGLU)."""
        return self.activation in ("swiglu", "geglu_tanh")

    def window_of(self, layer: int) -> int:
        """Return the number of tokens that a query of this layer attends to, itself included. 0 = all tokens before
        it.
        """
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
        """Number of rows of the embedding. Rows past vocab_size keep their initial values and never enter a logit."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
