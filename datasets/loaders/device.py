"""The last stage of every loader: uint8 images become normalised float images on the device."""

import sys

import cv2
import numpy as np
import torch

_KEPT = 4  # batches whose memory is used again


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_OURS = _references([np.empty(0)])[0]  # of an array that nothing but the list holds


class ToDevice:
    """Images uint8 [n, C, H, W] -> float [n, C, H, W], channels_last, (pixel / 255 - mean) / std.

    The precision is torch's default dtype, float32 unless it was changed. To a GPU a quarter of the bytes
    travel, from pinned memory, on a stream of their own; the caller's stream waits for them, not the caller.
    """

    def __init__(self, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]):
        self.device = device
        self._shift = 255 * torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self._scale = 1 / (255 * torch.tensor(std, device=device).view(1, -1, 1, 1))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        levels = torch.arange(256, dtype=torch.uint8, device=device).view(-1, 1, 1, 1)
        levels = levels.expand(-1, len(mean), 1, 1)
        self._results: list[np.ndarray] = []
        # [256, C]: what each value of each channel becomes
        self._table = self._normalised(levels).reshape(256, -1).cpu().numpy()

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stream is None:
            return self._looked_up(images), labels
        current = torch.cuda.current_stream(self.device)
        if images.is_cuda:
            self._stream.wait_stream(current)  # an engine on the GPU has put them there
        with torch.cuda.stream(self._stream):
            on_host, self._copied = not images.is_cuda, torch.cuda.Event()
            images, labels = self._move(images), self._move(labels)
            if on_host:
                self._copied.record()
            images = self._normalised(images)
            if not on_host:  # an engine's own memory is read until here
                self._copied.record()
        current.wait_stream(self._stream)
        images.record_stream(current)  # its memory is not given away while the caller's stream reads it
        labels.record_stream(current)
        return images, labels

    def wait(self) -> None:
        """Until the last images are no longer needed where they were given."""
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

    def _looked_up(self, images: torch.Tensor) -> torch.Tensor:
        """The same numbers from a table, in one pass over memory instead of three."""
        rows = images.permute(0, 2, 3, 1)
        if not rows.is_contiguous() or not len(rows):
            return self._normalised(images)
        result = self._memory(rows.shape)
        flat = -1, *rows.shape[2:]
        cv2.LUT(rows.view(flat).numpy(), self._table[None], dst=result.reshape(flat))
        return torch.from_numpy(result).permute(0, 3, 1, 2)

    def _memory(self, shape: tuple[int, ...]) -> np.ndarray:
        """Memory for a batch: that of an earlier one, once nobody holds it. Fresh memory would cost more than
        what is written to it, in page faults.

        A tensor on it, and every view of that, holds a reference to the array. Not torch's own memory: its
        aligned blocks do not fit where such a block was freed (glibc before 2.38).
        """
        for count, result in zip(_references(self._results), self._results, strict=True):
            if count == _OURS and result.shape == shape:
                return result
        result = np.empty(shape, self._table.dtype)
        self._results = [*self._results[-_KEPT + 1 :], result]
        return result
