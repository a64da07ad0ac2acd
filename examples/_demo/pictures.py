"""Pictures as tensors, as PIL images and as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image


def fractal(width: int = 512, height: int = 600) -> torch.Tensor:
    """Returns the Mandelbrot set in three colours, as uint8 of shape (3, height, width)."""
    extents = [(-2.0, -1.6, 0.8, 1.6), (-1.9, -1.5, 0.7, 1.5), (-1.8, -1.4, 0.6, 1.4)]
    channels = [Image.effect_mandelbrot((width, height), extent, 60) for extent in extents]
    return torch.from_numpy(np.stack([np.array(channel) for channel in channels]))


def photograph() -> torch.Tensor:
    """Returns a photograph that matplotlib ships, as uint8 of shape (3, height, width)."""
    from matplotlib import cbook  # only the notebooks need it

    with cbook.get_sample_data("grace_hopper.jpg") as file, Image.open(file) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def save(picture: torch.Tensor, file: Path) -> None:
    """Saves a picture of values from 0 to 255 as a PNG."""
    pixels = picture.detach().to(torch.uint8).permute(1, 2, 0).contiguous()
    Image.fromarray(pixels.numpy()).save(file)


# PIL's images with several channels hold 8 bits for each value. A float would be clipped to 0...255
# and rounded on its way through one, and a gradient has neither that range nor that grid. Moving
# pixels about is all that crop and paste do, though, so here PIL moves the bytes: a value of n
# bytes is n pixels wide, and comes out bit for bit as it went in, whatever its dtype.


def to_pil(picture: torch.Tensor) -> list[Image.Image]:
    """Returns an image of bytes for each channel; columns are `picture.element_size()` wide."""
    as_bytes = picture.detach().cpu().contiguous().view(torch.uint8)
    return [Image.fromarray(channel) for channel in as_bytes.numpy()]


def from_pil(channels: list[Image.Image], like: torch.Tensor) -> torch.Tensor:
    """Puts images of bytes together again, with the dtype and on the device of `like`."""
    as_bytes = torch.from_numpy(np.stack([np.array(channel) for channel in channels]))
    return as_bytes.view(like.dtype).to(like.device)
