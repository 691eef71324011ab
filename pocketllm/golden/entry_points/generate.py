"""`pocketllm generate --json` as a subprocess: what a person at a terminal gets."""

import json
import subprocess
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pocketllm.errors import NotJudgedError
from pocketllm.golden.compare import Observed
from pocketllm.golden.fixture import Case
from pocketllm.golden.served_path import pocketllm_command

if TYPE_CHECKING:
    from pocketllm.golden.subject import Subject

TIMEOUT_S = 300.0


class Generate:
    """Runs the command once a case."""

    def __init__(self, subject: "Subject") -> None:
        self._subject = subject

    def answer(self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None) -> Observed:
        """Run the command and read its JSON; one that ends otherwise than with 0 or 2 was not judged."""
        command = self.command(case)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotJudgedError(f"`pocketllm generate` did not end within {TIMEOUT_S:g} s") from error
        last_words = done.stderr.strip().splitlines()[-3:]
        if done.returncode == 2:
            return Observed(status=400, error=" ".join(last_words))
        if done.returncode != 0:
            raise NotJudgedError(f"`pocketllm generate` ended with code {done.returncode}: {' '.join(last_words)}")
        return read_output(done.stdout)

    def resume(self, case: Case, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        """The command takes no token ids: the same options in this process go on in its place."""
        from pocketllm.golden.entry_points import open_client

        with open_client("in_process", self._subject) as client:
            return client.resume(case, token_ids, max_tokens)

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[float, ...] | None:
        """The command scores nothing."""
        return None

    def command(self, case: Case) -> list[str]:
        """The argument list for a case."""
        words = ["generate", *self._subject.engine_flags(), "--json", "--logprobs=0"]
        for key, value in case.sampling.items():
            flag = "--" + key.replace("_", "-")
            if isinstance(value, bool):
                words += [flag] if value else []
            else:
                for item in value if isinstance(value, list) else [value]:
                    words += [f"{flag}={item}"]
        if case.kind == "chat":
            return pocketllm_command(*words, f"--chat={case.messages[0]['content']}")
        return pocketllm_command(*words, "--", case.prompt)


def read_output(text: str) -> Observed:
    """The command's JSON as an observation."""
    try:
        output = json.loads(text)
        return Observed(
            prompt_token_ids=tuple(output["prompt_token_ids"]),
            token_ids=tuple(output["token_ids"]),
            text=output["text"],
            finish_reason=output["finish_reason"],
            num_prompt_tokens=output["usage"]["prompt_tokens"],
            num_output_tokens=output["usage"]["completion_tokens"],
            num_cached_tokens=output["usage"]["cached_tokens"],
            logprobs=tuple(entry["chosen"] for entry in output["logprobs"]),
            ttft_s=output["timings"].get("ttft_s"),
            e2el_s=output["timings"].get("total_s"),
        )
    except (ValueError, KeyError, TypeError) as error:
        return Observed(error=f"`pocketllm generate --json` printed another shape ({type(error).__name__}: {error})")
