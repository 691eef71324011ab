"""Recurrent layers on the native library."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch, Int32Array
from pocketllm.engine.backends.api.recurrent import UNIT_EPS, DeltaNet, KimiDelta
from pocketllm.engine.backends.cpu.library import DeltaPlan, KimiPlan, Program, StatePlan
from pocketllm.engine.backends.cpu.operations.recorder import Recorder, width_of
from pocketllm.engine.backends.cpu.program import Float32Array, address_of, pointer


class States:
    """conv: [layers, slots, rows, channels]; delta: [layers, slots, heads, key_dim, value_dim]; float32.

    Zeros, which the operating system hands out as they are written.
    """

    def __init__(self, num_layers: int, conv: tuple[int, int], delta: tuple[int, int, int], num_slots: int) -> None:
        self.conv = np.zeros((num_layers, num_slots, *conv), np.float32)
        self.delta = np.zeros((num_layers, num_slots, *delta), np.float32)


def state_plan(states: npt.NDArray[np.float32], layer: int) -> StatePlan:
    """One layer's states as the library takes them."""
    own = states[layer]
    plan = StatePlan(address_of(own), own[0].size, len(own))
    plan.states_kept = own  # whoever borrows the address holds the plan
    return plan


class RecurrentOps(Recorder):
    """Operations over states in slots."""

    def new_states(self, num_layers: int, conv: tuple[int, int], delta: tuple[int, int, int], num_slots: int) -> States:
        return States(num_layers, conv, delta, num_slots)

    def copy_states(self, states: States, sources: Int32Array, targets: Int32Array) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for kept in (states.conv, states.delta):
                kept[:, target] = kept[:, source]

    def causal_conv(
        self,
        x: Any,
        kernel: Float32Array,
        states: States,
        layer: int,
        batch: ForwardBatch,
        silu: bool,
        dilation: int = 1,
    ) -> Any:
        channels, taps = kernel.shape
        assert channels == width_of(x), (channels, width_of(x))
        by_tap, plan = np.ascontiguousarray(kernel.T), state_plan(states.conv, layer)

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("causal_conv", inputs[0], channels, pointer(by_tap), taps, dilation, silu, plan, outputs[0])

        return self.compute(append, (x,), (channels,), batch)[0]

    def gated_delta(
        self, mixed: Any, step: Any, share: Any, net: DeltaNet, states: States, layer: int, batch: ForwardBatch
    ) -> Any:
        plan = DeltaPlan(
            net.num_key_heads,
            net.num_value_heads,
            net.key_dim,
            net.value_dim,
            net.is_tiled,
            UNIT_EPS,
            pointer(net.rate),
            pointer(net.time_bias),
        )
        plan.net_kept = net
        kept, width = state_plan(states.delta, layer), width_of(mixed)
        assert width_of(step) == width_of(share) == net.num_value_heads, (width_of(step), width_of(share))

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("gated_delta", inputs[0], width, inputs[1], inputs[2], plan, kept, outputs[0])

        return self.compute(append, (mixed, step, share), (net.num_value_heads * net.value_dim,), batch)[0]

    def kimi_delta(
        self,
        q: Any,
        k: Any,
        v: Any,
        step: Any,
        share: Any,
        net: KimiDelta,
        states: States,
        layer: int,
        batch: ForwardBatch,
    ) -> Any:
        bound = net.lower_bound
        weights = pointer(net.rate), pointer(net.time_bias)
        plan = KimiPlan(net.num_heads, net.dim, bound is not None, bound or 0.0, UNIT_EPS, *weights)
        plan.net_kept = net
        kept, width = state_plan(states.delta, layer), net.num_heads * net.dim
        assert [width_of(x) for x in (q, k, v, step, share)] == [width] * 4 + [net.num_heads], net

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("kimi_delta", *inputs, plan, kept, outputs[0])

        return self.compute(append, (q, k, v, step, share), (width,), batch)[0]
