"""Create pictures, and convert between tensors, PIL images and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image


def fractal(width: int = 512, height: int = 600) -> torch.Tensor:
    """Return the Mandelbrot set in three colours, as uint8 of shape (3, height, width)."""
    extents = [(-2.0, -1.6, 0.8, 1.6), (-1.9, -1.5, 0.7, 1.5), (-1.8, -1.4, 0.6, 1.4)]
    channels = [Image.effect_mandelbrot((width, height), extent, 60) for extent in extents]
    return torch.from_numpy(np.stack([np.array(channel) for channel in channels]))


def photograph() -> torch.Tensor:
    """Return a photograph from matplotlib, as uint8 of shape (3, height, width)."""
    from matplotlib import cbook  # only the notebooks need it

    with cbook.get_sample_data("grace_hopper.jpg") as file, Image.open(file) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def save(picture: torch.Tensor, file: Path) -> None:
    """Save a picture with values from 0 to 255 as a PNG."""
    pixels = picture.detach().to(torch.uint8).permute(1, 2, 0).contiguous()
    Image.fromarray(pixels.numpy()).save(file)


# PIL images with several channels hold 8 bits per value, which would clip and round floats such as
# gradients. Crop and paste only move pixels, so these helpers convert each value of n bytes to n
# pixels of a byte. All dtypes round-trip exactly.


def to_pil(picture: torch.Tensor) -> list[Image.Image]:
    """Return an image of bytes for each channel, with `picture.element_size()` pixels per value."""
    as_bytes = picture.detach().cpu().contiguous().view(torch.uint8)
    return [Image.fromarray(channel) for channel in as_bytes.numpy()]


def from_pil(channels: list[Image.Image], like: torch.Tensor) -> torch.Tensor:
    """Convert images of bytes to a picture with the dtype and device of `like`."""
    as_bytes = torch.from_numpy(np.stack([np.array(channel) for channel in channels]))
    return as_bytes.view(like.dtype).to(like.device)
