"""What a step costs beside the model: the real loop over a model that answers at once.

`step_costs_s` is what the `op_latency` scenario records: schedule, batch, sample, detokenize and tell, with the real
tokenizer; everything but the forward pass. Where a backend draws tokens itself, sampling is what is said to it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.drawing import Draw, Drawn
from pocketllm.engine.backends.api.ops import KVCache, Tensor
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.request import Event, Request
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.lifecycle.steps.runner import Runner
from pocketllm.engine.models.contract import KVSpec
from pocketllm.engine.plan import Limits
from pocketllm.engine.text.tokenizer import Tokenizer

ROWS = 61
"""Different rows of logits; a step takes the next ones, so that tokens differ from step to step."""

PROMPT_TOKENS = 32
WARM_STEPS = 10


class NullModel:
    """Obeys models.contract.Model and computes nothing; its logits are fixed pseudo-random rows.

    They are as steep as a language model's: 1,024 tokens of 49,152 hold nearly all of the mass.
    """

    kv_spec = KVSpec(num_layers=1, num_kv_heads=1, key_dim=1, value_dim=1)

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self.vocab_size = vocab_size
        random = np.random.default_rng(1)
        self._rows = 4 * random.standard_normal((ROWS + max_num_seqs, vocab_size), np.float32)
        self._next = 0

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The rows that are wanted, and nothing of them."""
        return batch.logit_rows

    def logits(self, hidden: Tensor) -> npt.NDArray[np.float32]:
        """[rows, vocab]"""
        self._next = (self._next + 1) % ROWS
        return self._rows[self._next : self._next + len(hidden)]


@dataclass(frozen=True)
class NullDraws:
    """Tokens that are there already."""

    tokens: Sequence[Drawn]

    def wait(self) -> Sequence[Drawn]:
        return self.tokens


class NullDrawer:
    """Obeys backends.api.drawing.Drawer and draws nothing; its tokens are a fixed sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._ids = np.random.default_rng(2).integers(0, vocab_size, ROWS).tolist()
        self._next = 0

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> NullDraws:
        self._next += 1
        return NullDraws([Drawn(self._ids[(self._next + draw.row) % ROWS]) for draw in draws])

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        return logits


def null_loop(
    tokenizer: Tokenizer, width: int, max_model_len: int = 4096, is_drawn: bool = False, max_steps_in_flight: int = 1
) -> EngineLoop:
    """The real loop over a NullModel, with room for `width` requests of max_model_len tokens.

    is_drawn: as over a backend that draws tokens itself. max_steps_in_flight: as `plan.Limits` has it.
    """
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=width,
        max_num_batched_tokens=512,
        prefill_chunk=256,
        block_size=16,
        num_blocks=width * -(-max_model_len // 16),
        watermark=0.0,
        reserve=1.0,
        max_queued_requests=width,
        max_steps_in_flight=max_steps_in_flight,
    )
    model = NullModel(tokenizer.vocab_size, width)
    runner = Runner(lambda batch: model.forward(batch, None), model.logits, limits.block_size, lambda x, rows: x[rows])
    if is_drawn:
        runner.draw_by(NullDrawer(model.vocab_size), model.logits, np.asarray)
    return EngineLoop(Scheduler(limits, model.vocab_size), runner, tokenizer)


def step_costs_s(
    tokenizer: Tokenizer,
    width: int,
    num_steps: int = 500,
    params: SamplingParams | None = None,
    is_drawn: bool = False,
    max_steps_in_flight: int = 1,
) -> list[float]:
    """Seconds of each of `num_steps` decode steps with `width` requests in them; the steps before are left out.

    params: how tokens are drawn, greedy when None; the answers are as long as the steps need, whatever it says.
    is_drawn, max_steps_in_flight: see `null_loop`.
    """
    loop = null_loop(tokenizer, width, is_drawn=is_drawn, max_steps_in_flight=max_steps_in_flight)
    events: list[Event] = []
    drawn = replace(params or SamplingParams(temperature=0.0), max_tokens=WARM_STEPS + num_steps + 1, ignore_eos=True)
    for number in range(width):
        # prompts of their own, so that none waits for another's blocks
        prompt = [(number + place) % tokenizer.vocab_size for place in range(PROMPT_TOKENS)]
        loop.submit(Request(f"null-{number}", prompt, drawn), events.append)
    for _ in range(WARM_STEPS + max_steps_in_flight - 1):  # the first ones tell nothing where they stay in flight
        loop.step()
    costs_s = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        loop.step()
        costs_s.append(time.perf_counter() - start_s)
    assert len(events) == width * (WARM_STEPS + num_steps), "a request ended, or a step was not a decode step"
    loop.stop()
    return costs_s
