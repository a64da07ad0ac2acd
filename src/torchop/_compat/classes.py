"""Classes and pytree functions of PyTorch that have no public name."""

from torch._C import DispatchKey as DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet
from torch._C import FunctionSchema as FunctionSchema
from torch._C import Tag as Tag
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._library.effects import EffectType as EffectType
from torch._library.fake_class_registry import FakeScriptObject as FakeScriptObject
from torch._library.fake_impl import FakeImplCtx as FakeImplCtx
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.utils._python_dispatch import BaseTorchDispatchMode as BaseTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
