"""Generated images for a smoke test: as many as seed 003 generates, with all ten classes, and learnable."""

import torch

CLASSES = 10
TRAIN, TEST = 5000, 1000


def generate(
    channels: int, side: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Two pairs (images uint8 [N, channels, side, side], labels int64 [N]), N = 5000 and 1000, always the
    same.

    Each class is a smooth random pattern; noise of the same contrast is laid over it.
    """
    generator = torch.Generator().manual_seed(2024)
    coarse = torch.randn(CLASSES, channels, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randperm(count, generator=generator) % CLASSES
        noise = torch.randn(count, channels, side, side, generator=generator)
        return (128 + 40 * patterns[labels] + 40 * noise).clamp(0, 255).to(torch.uint8), labels

    return draw(TRAIN), draw(TEST)
