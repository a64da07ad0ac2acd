"""Functions in C on a device with streams: they run on that of PyTorch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import torchop
import torchop.export
from tests.device import target
from tests.export.support import build, stand_in

pytest.importorskip("tvm_ffi")

FUNCTIONS = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

static DLDevice device;
static void* stream;

void note(tvm::ffi::TensorView x, bool fails, tvm::ffi::TensorView) {
  device = x.device();
  stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  if (fails)
    TVM_FFI_THROW(ValueError) << "not this one";
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(note, note)

extern "C" __attribute__((visibility("default"))) void* seen_stream() { return stream; }
extern "C" __attribute__((visibility("default"))) int seen_index() { return device.device_id; }
extern "C" __attribute__((visibility("default"))) void* stream_now() {
  return TVMFFIEnvGetStream(device.device_type, device.device_id);
}
"""


@pytest.mark.parametrize("place", [target.FIRST, target.SECOND])
def test_a_function_runs_on_the_stream_of_pytorch(
    namespace: str, tmp_path: Path, place: str
) -> None:
    path = build(tmp_path, "functions", FUNCTIONS)
    seen = ctypes.CDLL(str(path))
    seen.seen_stream.restype = seen.stream_now.restype = ctypes.c_void_p
    op = torchop.custom_op(
        f"{namespace}::note",
        lambda x, fails: x,
        schema="(Tensor x, bool fails) -> Tensor",
        mutates_args=(),
    )
    torchop.export.register_c_function(op, path, "note", target.TYPE)
    x = torch.ones(4, device=place)
    out = torch.empty_like(x)
    for _ in range(2):  # the first call loads the function
        stream = torch.Stream(x.device)
        device = target.module().device
        with device(x.device.index), target.module().stream(stream), device(0):
            stand_in(op)(x, False, outs=(out,))
            assert torch.accelerator.current_device_index() == 0
        assert seen.seen_stream() == stream.stream_id + 1000
        assert seen.seen_index() == x.device.index
        assert seen.stream_now() is None  # as before the call
    with pytest.raises(RuntimeError, match=f"^{op.name}: ValueError: not this one"):
        stand_in(op)(x, True, outs=(out,))
    assert seen.stream_now() is None


def test_a_function_that_knows_no_stream_is_refused(namespace: str, tmp_path: Path) -> None:
    source = """
        #include <tvm/ffi/c_api.h>
        extern "C" __attribute__((visibility("default"))) int __tvm_ffi_plain(
            void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return 0; }
    """
    path = build(tmp_path, "plain", source, linked=False)
    op = torchop.custom_op(
        f"{namespace}::plain", lambda x: x, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    torchop.export.register_c_function(op, path, "plain", target.TYPE)
    x = torch.ones(4, device=target.FIRST)
    with pytest.raises(RuntimeError, match=f"^{op.name}: its library has no tvm-ffi, which tells"):
        stand_in(op)(x, outs=(torch.empty_like(x),))
