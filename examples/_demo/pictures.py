"""Create pictures, and convert between tensors, PIL images and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image


def fractal(width: int = 512, height: int = 600) -> torch.Tensor:
    """Return a picture of the Mandelbrot set, as a uint8 tensor of shape (3, height, width)."""
    extents = [(-2.0, -1.6, 0.8, 1.6), (-1.9, -1.5, 0.7, 1.5), (-1.8, -1.4, 0.6, 1.4)]
    channels = [Image.effect_mandelbrot((width, height), extent, 60) for extent in extents]
    return torch.from_numpy(np.stack([np.array(channel) for channel in channels]))


def photograph() -> torch.Tensor:
    """Return matplotlib's sample photograph, as a uint8 tensor of shape (3, height, width)."""
    from matplotlib import cbook  # imported here, because only the notebooks need it

    with cbook.get_sample_data("grace_hopper.jpg") as file, Image.open(file) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def save(picture: torch.Tensor, file: Path) -> None:
    """Save a picture, whose values are from 0 to 255, as a PNG file."""
    pixels = picture.detach().to(torch.uint8).permute(1, 2, 0).contiguous()
    Image.fromarray(pixels.numpy()).save(file)


# PIL's colour images have 8 bits per value. That is too little for gradients and other floats. But
# crop and paste only move pixels, and do not compute with them. So the following functions convert
# each value of n bytes to n pixels of one byte, and back. This is exact for all dtypes.


def to_pil(picture: torch.Tensor) -> list[Image.Image]:
    """Return one PIL image per channel, with one pixel for each byte of the channel's values."""
    as_bytes = picture.detach().cpu().contiguous().view(torch.uint8)
    return [Image.fromarray(channel) for channel in as_bytes.numpy()]


def from_pil(channels: list[Image.Image], like: torch.Tensor) -> torch.Tensor:
    """Convert the images from `to_pil` back to a picture with the dtype and device of `like`."""
    as_bytes = torch.from_numpy(np.stack([np.array(channel) for channel in channels]))
    return as_bytes.view(like.dtype).to(like.device)
