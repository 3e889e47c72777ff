"""The last stage of every loader: uint8 images become normalised float images on the device."""

import torch

_TOGETHER = 1 << 18  # values normalised at a time on the CPU: what stays in its cache


class ToDevice:
    """Images uint8 [n, C, H, W] -> float [n, C, H, W], channels_last, (pixel / 255 - mean) / std.

    The precision is torch's default dtype, float32 unless it was changed. To a GPU a quarter of the bytes
    travel, from pinned memory and beside the computation; the caller's stream waits for them, not the caller.
    """

    def __init__(self, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]):
        self.device = device
        self._shift = 255 * torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self._scale = 1 / (255 * torch.tensor(std, device=device).view(1, -1, 1, 1))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stream is None:
            return self._normalised_in_parts(images), labels
        current = torch.cuda.current_stream(self.device)
        if images.is_cuda:
            self._stream.wait_stream(current)  # an engine on the GPU has put them there
        with torch.cuda.stream(self._stream):
            moved, labels = self._move(images), self._move(labels)
            self._copied = torch.cuda.Event()
            self._copied.record()
            images = self._normalised(moved)
        current.wait_stream(self._stream)
        images.record_stream(current)  # its memory is not given away while the caller's stream reads it
        labels.record_stream(current)
        return images, labels

    def wait(self) -> None:
        """Until the last images have left the memory that was given."""
        if self._copied:
            self._copied.synchronize()
            self._copied = None

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self._shift.dtype).sub_(self._shift).mul_(self._scale)
        return images.contiguous(memory_format=torch.channels_last)

    def _normalised_in_parts(self, images: torch.Tensor) -> torch.Tensor:
        """Three passes over memory would cost more than the arithmetic."""
        result = torch.empty(
            images.shape, dtype=self._shift.dtype, memory_format=torch.channels_last, device=self.device
        )
        together = max(1, _TOGETHER // max(1, images[0].numel())) if len(images) else 1
        for target, source in zip(result.split(together), images.split(together), strict=True):
            target.copy_(source).sub_(self._shift).mul_(self._scale)
        return result
