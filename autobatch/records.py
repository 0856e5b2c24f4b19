"""The records that stages hand to one another: frozen, with units in their names.

A later stage adds a record; it never rewrites an earlier one. What can be derived
is a function beside the record, and is added when a record is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1

# ---- data ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where rows come from and how they were read."""

    files: tuple[str, ...]
    format: str  # messages | conversations | question_answer | ... (dataset.formats)
    keys: dict[str, str]  # e.g. {"prompt_key": "question", "response_key": "answer"}
    fingerprint: str  # changes with the files, the format, the keys and the renderer
    revision: str | None = None  # the commit of a data set from a hub


@dataclass(frozen=True, kw_only=True)
class LengthStats:
    """Token lengths of samples; a percentile is numpy's `inverted_cdf`."""

    mean: float
    min: int
    p50: int
    p90: int
    p95: int
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True)
class PaddingFraction:
    """Share of computed tokens that are padding, by strategy."""

    to_max_length: float
    to_longest: float
    sorted: float
    packed: float


@dataclass(frozen=True, kw_only=True)
class MaxLengthOption:
    """What one candidate max_length costs."""

    max_length: int
    rows_cut: int
    label_tokens_lost: int
    rows_without_labels: int
    padding_fraction: PaddingFraction


@dataclass(frozen=True, kw_only=True)
class MaxLengthAdvice:
    """The recommended max_length with its reason, and the curve behind it."""

    recommended: int
    reason: str
    curve: tuple[MaxLengthOption, ...]


@dataclass(frozen=True, kw_only=True)
class ProfileWarning:
    """A warning in three parts: what was seen, its likely cause, what to do."""

    id: str
    seen: str
    cause: str
    next_move: str


@dataclass(frozen=True, kw_only=True)
class RowPlace:
    """Where a row lies."""

    file: str
    row: int  # in its file, 0-based


@dataclass(frozen=True, kw_only=True)
class LongRow:
    """A row with its length in tokens, uncut."""

    file: str
    row: int  # in its file, 0-based
    length_tokens: int


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """What a profile of some rows knows of them all; errors hold at 95 %."""

    num_rows_read: int
    num_rows: int
    seed: int
    # Any row that would be the longest at this density was read, so length.max is exact unless
    # a row is denser than the longer half of those read.
    tokens_per_character: float
    error_tokens: dict[str, int]  # p50, p90, p95, p99: plus or minus
    num_tokens_error_fraction: float


@dataclass(frozen=True, kw_only=True)
class LengthProfile:
    """Token lengths of a data set under one tokenizer and template, uncut."""

    data: DataSource
    model: str | None
    tokenizer: str
    template_hash: str | None
    cache_dir: str | None
    complete: bool
    num_rows: int
    num_samples: int
    skipped: dict[str, int]
    num_rows_without_labels: int
    num_tokens: int
    num_label_tokens: int
    length: LengthStats
    histogram: tuple[tuple[int, int], ...]  # (length_tokens, count), ascending
    max_length: MaxLengthAdvice
    warnings: tuple[ProfileWarning, ...] = ()
    longest: tuple[LongRow, ...] = ()  # the longest samples, descending
    skipped_rows: dict[str, tuple[RowPlace, ...]] = field(default_factory=dict)  # the first few
    sampled: SampledRows | None = None  # None: no row was left out on purpose
    schema_version: int = SCHEMA_VERSION


# ---- cards -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A named card: what it holds, how fast it is, and where the numbers come from."""

    name: str  # model, dash, gigabytes on the sticker, g: a100-80g
    vendor_name: str  # as nvidia-smi prints it
    visible_memory_bytes: int  # what torch reports as total_memory
    non_torch_bytes: int  # context and libraries, outside torch's allocator
    bf16_flops_per_sec: float | None  # dense peak; None: the card has no bf16
    memory_bytes_per_sec: float
    interconnect_bytes_per_sec: float | None  # NVLink, else PCIe; both directions together
    compute_capability: str  # "8.0"
    tested: bool  # whether the numbers were confirmed on such a card
    source: str
    checked_on: str  # ISO date


# ---- model -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder's shape, in Hugging Face's own config words."""

    path: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int | None
    tie_word_embeddings: bool
    attention_bias: bool
    config_hash: str
    has_weights: bool


# ---- candidates and trials -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Toggles:
    """The switches of the engine; each field is the last part of its config key."""

    use_remove_padding: bool = True
    use_liger: bool = False
    loss_kernel: str = "chunked"  # fused | chunked | logits
    loss_chunk_tokens: int | None = None  # None: chosen from hidden_size and vocab_size
    gradient_checkpointing: str = "none"  # none|selective|selective_matmul|every_2|full
    attn_implementation: str = "reference"  # varlen|reference|sdpa|flash_attention_2|3|4
    compile: bool = False
    strategy: str = "fsdp2"  # fsdp2 | single
    reshard_after_forward: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Toggles and exactly one size: rows (padded) or a token budget (padding-free)."""

    toggles: Toggles
    micro_batch_size_per_gpu: int | None = None
    max_token_len_per_gpu: int | None = None

    @property
    def size(self) -> int:
        """The size that is searched: rows or tokens."""
        size = self.micro_batch_size_per_gpu or self.max_token_len_per_gpu
        assert size is not None
        return size


@dataclass(frozen=True, kw_only=True)
class Load:
    """The micro-batches of one optimizer step of a trial: row lengths, uncut by padding.

    `padded_to` is the length every row is padded to, None for packed rows.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    padded_to: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What happened when one candidate was stepped (or its steps were simulated)."""

    trial_id: str
    candidate: Candidate
    load: Load
    data_parallel_size: int
    measured: bool
    stand_in_for: str | None
    simulated_ranks: int | None
    outcome: str  # ok | oom | timeout | error
    message: str | None
    memory_limit_bytes: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    non_torch_bytes: int | None
    phase_peaks: dict[str, int]  # bytes by phase, worst rank
    step_secs: tuple[float, ...]  # every optimizer step, slowest rank
    num_alloc_retries: int | None
    seconds: float  # wall time of the whole trial
    micro_batch_secs: tuple[float, ...] = ()  # forward + backward, last step
    optimizer_secs: float | None = None  # clip + step + zero_grad, last step
    environment: dict[str, Any] = field(default_factory=dict)


def fits(trial: Trial) -> bool:
    """Return whether a trial stayed within its limit; used by search, certificate and report."""
    if trial.outcome != "ok" or trial.num_alloc_retries:
        return False
    assert trial.peak_reserved_bytes is not None
    assert trial.non_torch_bytes is not None
    return trial.peak_reserved_bytes + trial.non_torch_bytes <= trial.memory_limit_bytes


@dataclass(frozen=True, kw_only=True)
class WorstMicroBatch:
    """The micro-batch of a plan that needs most memory, and where it runs."""

    epoch: int
    step: int
    rank: int
    rows: int
    tokens: int  # computed tokens: padded ones count


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The proof that every micro-batch of the run fits."""

    plan_hash: str
    covers: str  # replay | any_draw
    epochs: int
    num_micro_batches: int
    worst: WorstMicroBatch
    proven_by: str | None  # trial_id of a measured trial that fitted
