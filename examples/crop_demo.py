"""Turn PIL's crop into a PyTorch operator. Call, compile, export, differentiate and check it.

    python examples/crop_demo.py [--output DIRECTORY] [--rounds N]

PyTorch cannot trace PIL. But once `crop` is an operator with a fake kernel and an autograd formula,
it works wherever PyTorch's own operators work.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

import torchop
from _demo.costs import measure_costs
from _demo.pictures import fractal, from_pil, save, to_pil

# --------------------------------------------------------------------------------------------------
# The operators


@torchop.custom_op("demo::crop", mutates_args=())
def crop(picture: Tensor, box: Sequence[int]) -> Tensor:
    """Cut a box (left, top, right, bottom) out of a picture of shape (channels, height, width)."""
    left, top, right, bottom = box
    width = picture.element_size()  # the number of PIL pixels per column, see `to_pil`
    columns = (width * left, top, width * right, bottom)
    return from_pil([channel.crop(columns) for channel in to_pil(picture)], like=picture)


@crop.register_fake
def _(picture: Tensor, box: Sequence[int]) -> Tensor:
    left, top, right, bottom = box
    return picture.new_empty(picture.shape[0], bottom - top, right - left)


# The formula of `crop` needs PIL's paste. A formula may only call operators, so define one for it.
@torchop.custom_op("demo::paste", mutates_args=())
def paste(background: Tensor, picture: Tensor, corner: Sequence[int]) -> Tensor:
    """Paste `picture` into a copy of `background`, with the upper left corner at (left, top)."""
    left, top = corner
    channels = to_pil(background)
    for channel, pasted in zip(channels, to_pil(picture.to(background)), strict=True):
        channel.paste(pasted, (background.element_size() * left, top))
    return from_pil(channels, like=background)


@paste.register_fake
def _(background: Tensor, picture: Tensor, corner: Sequence[int]) -> Tensor:
    return torch.empty_like(background, memory_format=torch.contiguous_format)


def keep_place(ctx: Any, inputs: tuple[Tensor, Sequence[int]], output: Tensor) -> None:
    picture, box = inputs
    ctx.shape, ctx.corner = picture.shape, box[:2]


@crop.register_autograd(setup_context=keep_place)
def _(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # Only the pixels inside the box have a gradient.
    return paste(grad.new_zeros(ctx.shape), grad, ctx.corner), None


# --------------------------------------------------------------------------------------------------
# The steps of the demo. Each step returns a summary, and raises an error if a check fails.

BOX = (130, 150, 380, 450)  # the middle of the picture


def negative(picture: Tensor) -> Tensor:
    """Call the operator together with PyTorch's. The demo compiles and exports this function."""
    return 255 - crop(picture, BOX).flip(-1)


def run_eagerly(original: Tensor, output: Path) -> str:
    left, top, right, bottom = BOX
    middle = crop(original, BOX)
    expect(torch.equal(middle, original[:, top:bottom, left:right]), "the crop is not the box")
    pasted = paste(torch.zeros_like(original), middle, BOX[:2])
    expect(torch.equal(crop(pasted, BOX), middle), "pasting and cropping changed the picture")
    save(original, output / "picture.png")
    save(middle, output / "crop.png")
    return f"{list(original.shape)} cropped to {list(middle.shape)}; all pixels equal the box"


def compile_it(original: Tensor, output: Path) -> str:
    graphs = []

    def counting_inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    compiled = torch.compile(negative, fullgraph=True, backend=counting_inductor)
    expect(torch.equal(compiled(original), negative(original)), "Inductor's result is not eager's")
    expect(len(graphs) == 1, f"there are {len(graphs)} graphs")
    crops = [node for node in graphs[0].graph.nodes if node.target is torch.ops.demo.crop.default]
    expect(len(crops) == 1, f"the operator is {len(crops)} nodes of the graph")

    picture = original.float().requires_grad_()
    weights = torch.randn_like(negative(picture))
    gradients = [
        torch.autograd.grad(function(picture), picture, weights)[0]
        for function in (compiled, negative)
    ]
    expect(torch.equal(*gradients), "the compiled gradient is not eager's")
    return "one graph, no break, crop is one node of it; result and gradient equal eager's"


def export_it(original: Tensor, output: Path) -> str:
    class Negative(torch.nn.Module):
        def forward(self, picture: Tensor) -> Tensor:
            return negative(picture)

    program = torch.export.export(Negative(), (original,))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "negative.pt2"
        torch.export.save(program, file)
        size = file.stat().st_size
        loaded = torch.export.load(file)
    expect(torch.equal(loaded.module()(original), negative(original)), "the loaded result differs")
    return f"saved as {size / 1024:.0f} KB, loaded again; the result equals eager's"


def differentiate(original: Tensor, output: Path) -> str:
    picture = original.float().requires_grad_()
    crop(picture, BOX).sum().backward()
    left, top, right, bottom = BOX
    ones_in_box = torch.zeros_like(original, dtype=torch.float32)
    ones_in_box[:, top:bottom, left:right] = 1
    expect(torch.equal(picture.grad, ones_in_box), "the gradient is not 1 inside and 0 outside")
    save(255 * picture.grad, output / "gradient.png")
    small = torch.randn(2, 5, 6, dtype=torch.double, requires_grad=True)
    torch.autograd.gradcheck(lambda picture: crop(picture, (1, 2, 4, 5)), small)
    return "the gradient of the sum is exactly 1 inside the box and 0 outside; gradcheck agrees"


def check_contract(original: Tensor, output: Path) -> str:
    examples = [
        (original, BOX),
        (torch.randn(3, 32, 48), (0, 0, 16, 8)),
        (torch.randn(1, 91, 33, requires_grad=True), (10, 0, 20, 91)),
        (torch.randn(3, 60, 60, dtype=torch.double), (3, 4, 32, 20)),
        (torch.randn(3, 300, 400, dtype=torch.double, requires_grad=True), (3, 4, 32, 45)),
        (torch.randn(24, 36, 3).permute(2, 0, 1), (5, 6, 7, 8)),
    ]
    for example in examples:
        torchop.opcheck(crop, example)
    torchop.opcheck(paste, (torch.zeros(3, 9, 9), torch.randn(3, 4, 4), (2, 3)))
    return (
        f"crop passes on {len(examples)} examples of several shapes, dtypes and strides; paste too"
    )


def expect(condition: bool, otherwise: str) -> None:
    # Don't use an assert statement, because `python -O` would remove it.
    if not condition:
        raise AssertionError(otherwise)


STEPS: dict[str, Callable[[Tensor, Path], str]] = {
    "eager": run_eagerly,
    "torch.compile": compile_it,
    "torch.export": export_it,
    "backward": differentiate,
    "opcheck": check_contract,
}


def working(console: Console, name: str) -> Progress:
    """Show a step's name, and in a terminal also how long the step has been running."""
    if not console.is_terminal:
        console.print(f"...  {name}")
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    disable = not console.is_terminal
    progress = Progress(*columns, console=console, transient=True, disable=disable)
    progress.add_task(name, total=None)
    return progress


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    root = Path(__file__).resolve().parents[1]
    output = root / "demo_output"
    parser.add_argument("--output", type=Path, default=output, help="folder for the PNG files")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of the time measurement")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    # If the output is not a terminal, rich would assume 80 columns, but the table needs more.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(f"{crop!r}\n{paste!r}\n", markup=False, soft_wrap=True)

    try:
        with working(console, "native calls"):
            torchop.native.wait()  # until then, calls would go through the dispatcher
    except torchop.native.NativeUnavailableError as problem:
        console.print(f"{problem}\n", markup=False, soft_wrap=True)

    torch.manual_seed(0)
    picture = fractal()
    failed = []
    for name, step in STEPS.items():
        try:
            with working(console, name):
                result = step(picture, options.output)
        except Exception:
            failed.append(name)
            console.print(f"[bold red]FAILED[/]  {name}")
            console.print_exception()
        else:
            console.print(f"[green]ok[/]  [bold]{name:14}[/] {result}", soft_wrap=True)
    with working(console, "measuring calls"):
        table, summary = measure_costs(options.rounds)
    console.print(f"\nPictures: {options.output}/{{picture,crop,gradient}}.png", soft_wrap=True)
    console.print()
    console.print(table)
    console.print(summary, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
