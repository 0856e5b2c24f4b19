"""What every command needs first: the config's rows as cached lengths, its model as a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autobatch.config import Config
from autobatch.dataset.lengths.planning import plan_of
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.lengths.shipped import ShippedSamples, samples_of
from autobatch.dataset.rows.formats import KEY_NAMES
from autobatch.dataset.rows.hub import fetch_model, parse_data, parse_model
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.dataset.tokens.tokenizer_files import largest_token_id
from autobatch.dataset.tokens.truncation import CutLengths
from autobatch.errors import ConfigError
from autobatch.model import read_model_spec
from autobatch.plan.epochs import Plan
from autobatch.plan.microbatches import check_longest_row
from autobatch.preflight.batch import check_batch
from autobatch.preflight.data import check_data
from autobatch.preflight.model import check_model
from autobatch.preflight.rule import warnings_or_raise
from autobatch.records import Candidate, LengthProfile, ModelSpec
from autobatch.storage import user_path

Talk = Callable[[str], None]
RowProgress = Callable[[int, int | None], None]


def once(talk: Talk) -> Talk:
    """Return a talk that says nothing twice."""
    said = set()

    def tell(message: str) -> None:
        if message not in said:
            said.add(message)
            talk(message)

    return tell


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The facts of one config."""

    config: Config
    profile: LengthProfile
    cache: TokenCache | ShippedSamples
    spec: ModelSpec

    def plan(self, candidate: Candidate, *, num_ranks: int) -> Plan:
        """Return the run's micro-batches under a candidate."""
        return plan_of(self.config, candidate, self.cache, self.spec, num_ranks=num_ranks)


def left_out(samples: TokenCache | ShippedSamples, cut: CutLengths) -> list[str]:
    """Return a line for each way in which samples are not trained on whole."""
    counts = {
        "are cut": cut.num_cut,
        "are dropped": cut.num_dropped,
        "have no label token and are left out": cut.num_without_labels,
    }
    return [
        f"{count} of {samples.num_samples} samples {words}"
        for words, count in counts.items()
        if count
    ]


def data_keys(config: Config) -> dict[str, str]:
    """Return the column names that the config sets."""
    values = {name: getattr(config.data, name) for name in KEY_NAMES}
    return {name: value for name, value in values.items() if value is not None}


def tokenizer_dir(config: Config) -> str:
    """Return where the tokenizer is: its own path, else the model's.

    Raises:
        ConfigError: if neither is set.
    """
    path = config.model.tokenizer_path or config.model.path
    if path is None:
        raise ConfigError(
            "model.path is not set, so there is no tokenizer; give --model DIR or model.path=DIR"
        )
    return path


def read_inputs(config: Config, *, progress: RowProgress | None = None) -> Inputs:
    """Return rows and model of a config; rows that were read before come from the cache.

    Raises:
        AutobatchError: if files, tokenizer or model cannot be used.
    """
    warnings_or_raise(check_data(config))
    tokenizer = tokenizer_dir(config)
    if config.model.path is None:
        raise ConfigError("model.path is not set; give --model DIR or model.path=DIR")
    spec = read_model_spec(config.model.path)
    profile = profile_lengths(
        config.data.train_files,
        tokenizer_dir=tokenizer,
        model=config.model.path,
        format=config.data.format,
        keys=data_keys(config),
        progress=progress,
    )
    assert profile.cache_dir is not None
    return Inputs(
        config=config, profile=profile, cache=TokenCache.open(profile.cache_dir), spec=spec
    )


def shipped_inputs(config: Config, profile: LengthProfile, *, talk: Talk) -> Inputs:
    """Return the lengths of a shipped profile, and the model of a config; say what they are.

    Raises:
        AutobatchError: if the model cannot be used.
    """
    warnings_or_raise(check_data(config, needs_files=False))
    if config.model.path is None:
        raise ConfigError("model.path is not set; give --model DIR or model.path=DIR")
    assert profile.origin is not None
    talk(
        f"lengths of {profile.origin.name} as shipped: {profile.num_samples:,} rows under the "
        f"tokenizer {profile.tokenizer} (another one gives other lengths), every token counted as "
        "a label, the worst of all orders stepped; give launch the data"
    )
    return Inputs(
        config=config,
        profile=profile,
        cache=samples_of(profile),
        spec=read_model_spec(config.model.path),
    )


def check_inputs(inputs: Inputs, plan: Plan, *, needs_weights: bool) -> list[str]:
    """Return the warnings of the rules that look at rows, model and batch arithmetic.

    Tuning needs no weights, training does.

    Raises:
        ConfigError: if a rule refuses; PlanError if the token budget is below the longest row.
    """
    longest = int(np.max(plan.lengths[plan.trainable]))
    if plan.settings.max_token_len_per_gpu is not None:
        check_longest_row(longest, plan.settings.max_token_len_per_gpu)
    findings = [
        *check_model(
            inputs.config,
            inputs.spec,
            longest_row=longest,
            largest_id=_largest_id(inputs),
            needs_weights=needs_weights,
        ),
        *check_batch(plan),
    ]
    return [finding.message for finding in warnings_or_raise(findings)]


def _largest_id(inputs: Inputs) -> int | None:
    """Return the largest id that data or tokenizer can bring; ready-made ids know no tokenizer.

    None for a shipped profile, which brings neither.
    """
    if isinstance(inputs.cache, ShippedSamples):
        return None
    largest = largest_token_id(tokenizer_dir(inputs.config))
    if inputs.profile.data.format == "input_ids":
        largest = max(largest, int(np.max(inputs.cache.tokens)))
    return largest


def data_name(name: str) -> str:
    """Return a data path that stays right from any working directory; other names as they are."""
    return name if "://" in name or parse_data(name) else str(user_path(name).absolute())


def model_dir(name: str) -> str:
    """Return the absolute folder of a model or tokenizer; of a Hub name what was fetched of it.

    Raises:
        ModelError: if the Hub does not give its tokenizer and config.
    """
    found = parse_model(name)
    return str(user_path(name).absolute()) if found is None else fetch_model(*found)
