"""What the tracer of the first micro-batch leaves behind; what it counts is held where policies are tested."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from remat.activation_checkpointing.mechanisms.counters import Scope
from remat.activation_checkpointing.op_tracer import OpTracer


def test_a_tensor_that_lives_on_keeps_no_model() -> None:
    net = nn.Linear(4, 4)
    with OpTracer(Scope(), torch.device("cpu"), weights=net.parameters) as tracer:
        kept = net(torch.ones(2, 4)).detach().clone()
    assert tracer.live_bytes >= kept.nbytes
    gone = weakref.ref(net)
    del net, tracer
    gc.collect()
    assert gone() is None and kept.shape == (2, 4)
