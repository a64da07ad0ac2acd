"""What PyTorch itself writes for other processes: the table of `docs/how-to/export.md`."""

from __future__ import annotations

from pathlib import Path

from tests.export.conftest import run_in

LOAD = """
    import pickle
    import sys
    import torch
    import torch.package
    from torch._dynamo.utils import counters

    x = torch.ones(2)

    def load_graph():
        with open("graph.pkl", "rb") as file:
            return pickle.load(file)

    try:
        load_graph()
    except AttributeError as error:
        print(error)

    model = torch.package.PackageImporter("extern.zip").load_pickle("model", "model.pkl")
    print(model(x).tolist(), "served_module" in sys.modules)
    print(load_graph()(x).tolist())

    import served_module
    import torchop

    print(torch.compile(served_module.ninefold)(x).tolist(), dict(counters["inductor"]))
    tag = torchop.cache_key_tag()
    served_module.triple.register_fake(lambda x, factor: x.new_empty(x.shape))
    print(torchop.cache_key_tag() != tag)

    model = torch.package.PackageImporter("intern.zip").load_pickle("model", "model.pkl")
    print(model(x).tolist())
    try:
        served_module.triple(x)
    except RuntimeError as error:
        print(type(error).__name__, error)
"""


def test_what_another_process_can_do_with_it(shipped: Path) -> None:
    lines = run_in(shipped, LOAD).splitlines()
    missing, extern, graph, compiled, changed, intern, replaced = lines
    assert "'served' object has no attribute 'triple'" in missing
    assert extern == "[4.0, 4.0] True"
    assert graph == "[4.0, 4.0]"
    assert compiled.startswith("[9.0, 9.0]")
    assert "'fxgraph_cache_hit': 1" in compiled
    assert "fxgraph_cache_miss" not in compiled
    assert changed == "True"  # the tag is a part of the key, if it is set
    assert intern == "[4.0, 4.0]"
    assert replaced.startswith("OperatorGoneError This is a handle of the served::triple")
    assert "<torch_package_" in replaced
