"""A language model: a small GPT that predicts the next token."""

import torch
from torch import nn
from torch.nn import functional

from bootfile.ground.errors import BadInput


class GPT(nn.Module):
    """A transformer decoder with pre-normalisation, learned positions, and one matrix for the embedding of
    tokens and the output.

    vocabulary: number of tokens. context: most tokens of an input. width: features of a token, a multiple of
    heads. dropout: share of features that are set to 0 in training, less than 1.

    Input int64 [N, T] of tokens, T <= context; output logits [N, T, vocabulary] of the next tokens. Raises
    BadInput for a width or a share that does not fit.

    Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, with its initial
    weights: a deviation of 0.02, divided by the root of 2 * layers for the outputs of a block.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ):
        super().__init__()
        if width % heads:
            raise BadInput(f"--width {width} is not a multiple of --heads {heads}")
        if not 0 <= dropout < 1:
            raise BadInput(f"--dropout {dropout} is not a share from 0 to less than 1")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # one table for both: a token that comes in and one that is predicted have the same vector
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.ndim <= 1:
                continue
            # smaller for the last layer of each branch, as in GPT-2: 2 * layers branches are added
            std = 0.02 / (2 * layers) ** 0.5 if "output" in name else 0.02
            nn.init.normal_(weight, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each token: see the class."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            features = block(features)
        return self.head(self.norm(features))


class Block(nn.Module):
    """A layer: attention to the tokens before, then a network for each token. Both are added to the input."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.network_norm = nn.LayerNorm(width)
        self.network = Network(width, dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return features [N, T, width] of features of this shape."""
        features = features + self.attention(self.attention_norm(features))
        return features + self.network(self.network_norm(features))


class Attention(nn.Module):
    """Causal self-attention with several heads. Its kernel is chosen by torch (flash attention on a GPU)."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.input = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return features [N, T, width] of features of this shape."""
        count, length, width = features.shape
        parts = self.input(features).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [N, heads, T, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        outputs = self.output(mixed.transpose(1, 2).reshape(count, length, width))
        return functional.dropout(outputs, self.dropout, self.training)


class Network(nn.Sequential):
    """Two linear layers with four times the features between them."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.output = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)


@torch.no_grad()
def generate(model: nn.Module, start: torch.Tensor, count: int, context: int, seed: int) -> torch.Tensor:
    """Return int64 [count]: tokens that continue `start` (int64 [n]), each drawn from the model. It has a
    generator of its own, so the random numbers of a training stay what they are. context: most tokens that
    the model reads."""
    generator = torch.Generator(start.device).manual_seed(seed)
    training = model.training
    tokens = start
    model.eval()  # train() comes back at the end: a job calls this between two epochs
    for _ in range(count):
        logits = model(tokens[None, -context:])[0, -1].float()
        probabilities = logits.nan_to_num().softmax(dim=0)  # a model that has diverged gives any tokens
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)])
    model.train(training)
    return tokens[len(start) :]
