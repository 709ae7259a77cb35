"""Verifying a golden folder: number formats, frequencies, every prompt and the draft block, on each pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.metadata.rope import inverse_frequencies
from dsv4.verify.by_layer import LayerCheck
from dsv4.verify.drafts import PROMPT, check_drafts
from dsv4.verify.golden import (
    CONFIG,
    DRAFT,
    PRIMITIVES,
    ROPE,
    WEIGHTS,
    StoredTensors,
    golden_folders,
    has_model,
    prompt_files,
    read_tensors,
)
from dsv4.verify.number_formats import check_number_formats
from dsv4.verify.prompts import PromptCheck
from dsv4.verify.report import FREQUENCY, Check, Report, compare, failed
from dsv4.verify.session import Session, VerifyOptions

GREEDY_ROOM = 64
"""Positions behind a prompt for its greedy continuation."""

Progress = Callable[[Iterable["Job"]], Iterable["Job"]]
"""Wraps the list of jobs, for a progress bar."""


@attrs.frozen(eq=False)
class Job:
    """A piece of work of some seconds."""

    title: str
    run: Callable[[], Iterable[Check]]
    folder: str = ""
    pool: str = ""

    def checks(self) -> list[Check]:
        with torch.inference_mode():
            return [attrs.evolve(c, folder=self.folder, pool=self.pool) for c in self.run()]


def verify(
    path: str | Path, options: VerifyOptions | None = None, progress: Progress = iter
) -> Report:
    """Check every stored tensor of a golden folder, and of the golden folders right below it.

    Raises CheckpointError for a folder that is none or is incomplete, ConfigError and KernelError for options that
    cannot be had; a tensor over its limit raises nothing, it is in the report.
    """
    options = options or VerifyOptions()
    jobs = [job for folder in golden_folders(Path(path)) for job in _folder_jobs(folder, options)]
    return Report(checks=tuple(check for job in progress(jobs) for check in job.checks()))


def _folder_jobs(folder: Path, options: VerifyOptions) -> Iterator[Job]:
    if (folder / PRIMITIVES).is_file():
        path = folder / PRIMITIVES
        yield Job(f"{folder.name} formats", lambda: check_number_formats(path), folder.name)
    if not has_model(folder):
        return
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: has prompts but no {CONFIG}; give a whole golden folder")
    golden = _GoldenModel(folder, options)
    if (folder / ROPE).is_file():
        yield Job(f"{folder.name} rope", golden.check_rope, folder.name)
    for pool in options.pools:
        yield from golden.jobs(pool)


class _GoldenModel:
    """A folder's model and prompts; builds a session per pool when the first job needs it."""

    def __init__(self, folder: Path, options: VerifyOptions) -> None:
        self.folder, self.options = folder, options
        self.model = ModelConfig.from_json(folder / CONFIG).without_drafts()
        self.weights: Mapping[str, Tensor] = read_tensors(folder / WEIGHTS)
        limit = math.inf if options.longest is None else options.longest
        self.prompts = [file for file in prompt_files(folder) if _num_tokens(file) <= limit]
        longest = max((_num_tokens(file) for file in self.prompts), default=0)
        self.max_context = longest + GREEDY_ROOM
        self._sessions: dict[str, tuple[Session, Session | None]] = {}

    def jobs(self, pool: str) -> Iterator[Job]:
        name = self.folder.name
        for file in self.prompts:
            title = f"{name} {pool} {file.stem}"
            yield Job(title, lambda file=file: self._prompt(pool, file), name, pool)  # type: ignore[misc]
        if (self.folder / DRAFT).is_file() and self._draft_prompt() and not self.options.by_layer:
            yield Job(f"{name} {pool} mtp", lambda: self._drafts(pool), name, pool)

    def check_rope(self) -> Iterator[Check]:
        """Inverse frequencies of both bases."""
        stored, model = StoredTensors(self.folder / ROPE), self.model
        bases = {
            "main.inv_freq": (model.rope_theta, None),
            "compress.inv_freq": (model.compress_rope_theta, model.yarn),
        }
        for name, (theta, yarn) in bases.items():
            got = inverse_frequencies(theta, model.qk_rope_head_dim, yarn)
            yield compare(stored.subject, name, got, stored.take(name), FREQUENCY)
        for name in stored.untaken:
            yield failed(stored.subject, name, "unknown tensor, not checked")

    def _prompt(self, pool: str, file: Path) -> Iterator[Check]:
        session, plain = self._session(pool)
        if self.options.by_layer:
            yield from LayerCheck(session, StoredTensors(file)).checks()
            return
        yield from PromptCheck(session, StoredTensors(file), self.options, plain).checks()

    def _drafts(self, pool: str) -> Iterator[Check]:
        prompt = self._draft_prompt()
        assert prompt is not None
        path, stored = self.folder / DRAFT, StoredTensors(prompt)
        yield from check_drafts(self.model, self.weights, path, stored, pool, self.options)

    def _draft_prompt(self) -> Path | None:
        """The prompt that the draft tensors belong to; None if it is too long."""
        files = prompt_files(self.folder)
        prompt = next((file for file in files if file.stem.startswith(PROMPT)), None)
        if prompt is None:
            raise CheckpointError(
                f"{self.folder}: {DRAFT} needs {PROMPT}*; give a whole golden folder"
            )
        return prompt if prompt in self.prompts else None

    def _session(self, pool: str) -> tuple[Session, Session | None]:
        """The model on a pool and, if it rounds its KV, the same without rounding."""
        if pool not in self._sessions:
            session = self._build(self.model, pool)
            rounds = self.model.kv_quant != "none"
            exact = attrs.evolve(self.model, kv_quant="none")
            self._sessions[pool] = (session, self._build(exact, pool) if rounds else None)
        return self._sessions[pool]

    def _build(self, model: ModelConfig, pool: str) -> Session:
        return Session(model, self.weights, pool, self.options, self.max_context)


def _num_tokens(file: Path) -> int:
    return int(StoredTensors(file).take("input_ids").shape[1])
