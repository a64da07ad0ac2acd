"""An operator with a data-dependent output size, in one compiled graph."""

import numpy as np
import torch
from torch import Tensor

import torchop


@torchop.custom_op("examples::peaks", mutates_args=())
def peaks(signal: Tensor) -> Tensor:
    """Return the indices of the local maxima of a signal."""
    values = signal.cpu().numpy()
    inner = (values[1:-1] > values[:-2]) & (values[1:-1] > values[2:])
    return torch.from_numpy(np.flatnonzero(inner) + 1).to(signal.device)


@peaks.register_fake
def _(signal: Tensor) -> Tensor:
    # The number of peaks depends on the data, so represent it by a symbol.
    count = torchop.get_ctx().new_dynamic_size()
    return signal.new_empty(count, dtype=torch.int64)


def peak_heights(signal: Tensor) -> Tensor:
    return signal[peaks(signal)] * 10


def main() -> None:
    # Without this setting, Dynamo breaks the graph at operators with data-dependent shapes.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    graphs = []

    def counting_eager(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(peak_heights, fullgraph=True, backend=counting_eager)
    for signal in ([0, 3, 1, 2, 5, 4, 0], [0, 1, 2, 3, 4, 5, 6], [0, 9, 0, 9, 0, 9, 0]):
        tensor = torch.tensor(signal, dtype=torch.float)
        heights = compiled(tensor)
        torch.testing.assert_close(heights, peak_heights(tensor))
        print(signal, "has peaks at", peaks(tensor).tolist(), "times ten:", heights.tolist())
    assert len(graphs) == 1, f"compiled {len(graphs)} times"
    print("compiled once, for any number of peaks")

    torchop.opcheck(peaks, (torch.randn(50),))
    torchop.opcheck(peaks, (torch.zeros(3),))


if __name__ == "__main__":
    main()
