"""The search finds the fastest candidate that fits, says why, and changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log2

import numpy as np
import pytest
import yaml
from tiny_model import tiny_model
from trials import trial_of

from autobatch.config import TUNABLE_KEYS, candidate_of, load_config, resolve
from autobatch.errors import ConfigError, NothingFitsError, RunError
from autobatch.model import num_parameters, read_model_spec
from autobatch.plan.settings import PlanSettings, make_plan
from autobatch.plan.worst import worst_micro_batch
from autobatch.probing.runner import ProbeRunner, toggle_set_name
from autobatch.records import Candidate, Load, Toggles, Trial, fits
from autobatch.storage import read_jsonl
from autobatch.tuning.bisect import largest_fitting
from autobatch.tuning.certificate import certify
from autobatch.tuning.objective import binding_of, judge_winner
from autobatch.tuning.schedule import first_timeout_secs, start_secs, starts_child
from autobatch.tuning.search import search
from autobatch.tuning.space import candidate_at, fixed_size, load_of, load_tokens, toggle_sets
from autobatch.tuning.speed import (
    PlanSample,
    estimate_run_secs,
    micro_batch_secs,
    predicted_secs,
    smallest_close_to_best,
)
from autobatch.tuning.verdict import tuned_config, write_verdict

MIB = 2**20
PACKED, PADDED = Toggles(), Toggles(use_remove_padding=False, attn_implementation="sdpa")
ONE_SET = ("model.use_remove_padding", "model.loss_kernel", "model.gradient_checkpointing")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads that wait for one another are slow where cores are shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def config_of(model, *overrides: str):
    return load_config(None, [f"model.path={model}", "trainer.device=cpu", *overrides])


def plan_of(candidate: Candidate, *, num_rows: int = 60, num_ranks: int = 1, batch: int = 20):
    lengths = np.random.Generator(np.random.PCG64(1)).integers(10, 100, size=num_rows)
    return make_plan(
        PlanSettings(
            train_batch_size=batch,
            data_parallel_size=num_ranks,
            seed=0,
            total_epochs=1,
            total_training_steps=None,
            max_token_len_per_gpu=candidate.max_token_len_per_gpu,
            micro_batch_size_per_gpu=candidate.micro_batch_size_per_gpu,
            use_remove_padding=candidate.toggles.use_remove_padding,
        ),
        lengths=lengths,
        label_tokens=lengths - 1,
    )


# ---- bisect ------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 8, 37, 64])
@pytest.mark.parametrize("start", [1, 8, 1024])
def test_the_largest_size_is_exact_from_any_start(limit, start):
    """Powers of two or not: the limit itself, stepped, in about 2·log2 trials."""
    tried = []

    def step(size: int) -> str:
        tried.append(size)
        return "fits" if size <= limit else "oom"

    found = largest_fitting(step, lower=1, upper=2048, start=start)
    assert (limit, "oom") == (found.largest, found.stopped_by)
    assert {limit, limit + 1} <= set(tried)
    assert len(tried) == len(set(tried)) <= 2 * log2(max(limit, start, 2)) + 3


def test_the_bracket_only_narrows():
    """What fits never falls and what fails never rises, in the log."""
    log = largest_fitting(lambda s: "fits" if s <= 37 else "oom", lower=1, upper=500).log
    fitted = [b.fits for b in log if b.fits is not None]
    failed = [b.fails for b in log if b.fails is not None]
    assert (sorted(fitted), sorted(failed, reverse=True)) == (fitted, failed)


@pytest.mark.parametrize("start", [1, 3, 9])
def test_a_search_without_a_limit_stops_at_the_cap(start):
    """The upper bound itself is tried, and is why the search stopped."""
    found = largest_fitting(lambda size: "fits", lower=1, upper=9, start=start)
    assert (9, "cap", 9) == (found.largest, found.stopped_by, found.log[-1].size)


def test_a_size_that_is_close_to_the_cap_is_the_cap():
    """Stepping two tokens more would cost a trial and show nothing."""
    tried: list[int] = []
    found = largest_fitting(
        lambda size: tried.append(size) or "fits",
        lower=1,
        upper=66,
        start=16,
        is_close=lambda fitted, other: abs(other - fitted) < 8,
    )
    assert ([16, 32, 64], 64, "cap") == (tried, found.largest, found.stopped_by)


def test_nothing_fits_is_none():
    """When the smallest size fails there is no size."""
    found = largest_fitting(lambda size: "oom", lower=3, upper=1000, start=1000)
    assert (None, "oom") == (found.largest, found.stopped_by)
    assert 3 == found.log[-1].size


def test_sizes_that_hang_do_not_fit():
    """Timeouts bound a size like memory does, and are told as time."""
    found = largest_fitting(lambda s: "timeout" if s >= 4 else "fits", lower=1, upper=64)
    assert (3, "time") == (found.largest, found.stopped_by)


def test_a_refused_size_ends_the_search_with_what_fitted():
    """Time that ends leaves the largest size so far."""
    found = largest_fitting(lambda s: "time" if s > 4 else "fits", lower=1, upper=64)
    assert (4, "time") == (found.largest, found.stopped_by)


# ---- space -------------------------------------------------------------------


def names(config, *, num_ranks=1, fixed=()) -> list[str]:
    sets = toggle_sets(resolve(config), num_ranks=num_ranks, fixed_keys=fixed)
    return [toggle_set_name(toggles) for toggles in sets]


def test_the_most_promising_toggle_set_comes_first(model):
    """Eight sets on the CPU: packed before padded, without checkpointing before with it."""
    found = names(config_of(model))
    assert 8 == len(set(found))
    assert ("packed-chunked-none", "padded-logits-full") == (found[0], found[-1])


def test_a_fixed_toggle_keeps_its_value(model):
    """A key that the user set is not searched."""
    found = names(config_of(model, "model.loss_kernel=logits"), fixed={"model.loss_kernel"})
    assert {"logits"} == {name.split("-")[1] for name in found}


def test_a_fixed_size_keeps_to_its_form(model):
    """A row count goes with padding, and only that size is tried."""
    config, key = (
        config_of(model, "data.micro_batch_size_per_gpu=4"),
        {"data.micro_batch_size_per_gpu"},
    )
    assert {"padded"} == {name.split("-")[0] for name in names(config, fixed=key)}
    assert 4 == fixed_size(resolve(config), key)


def test_fixed_keys_that_contradict_are_refused(model):
    """A row count with padding-free is refused with the two valid forms."""
    config = config_of(model, "data.micro_batch_size_per_gpu=4")
    with pytest.raises(ConfigError, match="do not go together"):
        names(config, fixed={"data.micro_batch_size_per_gpu", "model.use_remove_padding"})


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "single"), (2, "fsdp2")])
def test_the_strategy_follows_the_ranks(model, num_ranks, strategy):
    """One rank needs no sharding machinery."""
    sets = toggle_sets(resolve(config_of(model)), num_ranks=num_ranks, fixed_keys=())
    assert {strategy} == {toggles.strategy for toggles in sets}


def test_every_toggle_set_is_a_whole_config(model):
    """A candidate read back from its own keys is the same candidate."""
    from autobatch.config import candidate_values, with_values

    config = config_of(model)
    for toggles in toggle_sets(resolve(config), num_ranks=1, fixed_keys=()):
        candidate = candidate_at(toggles, 64)
        tuned = with_values(config, candidate_values(candidate))
        assert candidate == candidate_of(resolve(tuned))


# ---- objective ---------------------------------------------------------------


def timed(num_tokens: int, secs: float, **changes) -> Trial:
    candidate = candidate_at(PACKED, num_tokens)
    load = Load(micro_batches=((num_tokens,),) * 2)
    return trial_of(load, candidate, micro_batch_secs=(secs, secs), **changes)


@pytest.mark.parametrize(("num_tokens", "secs"), [(0, 1.0), (10, 2.0), (25, 3.5), (50, 6.0)])
def test_seconds_follow_one_affine_law(num_tokens, secs):
    """Trials of 1 s + 0.1 s a token promise that between them, below them, beyond them."""
    trials = [timed(10, 2.0), timed(40, 5.0), timed(20, 3.0)]
    assert pytest.approx(secs) == micro_batch_secs(trials, own=trials[1])(num_tokens)


def test_the_law_passes_through_the_candidates_own_trial():
    """A candidate measured 10 % slower than the law is promised 10 % more at every size."""
    own = timed(30, 4.4)
    law = micro_batch_secs([timed(10, 2.0), timed(40, 5.0)], own=own)
    assert pytest.approx((4.4, 2.2)) == (law(30), law(10))


def test_noise_between_close_trials_is_no_slope():
    """(4000, 1.00 s) and (4040, 1.04 s) promise an eighth of the time for 500 tokens, not 0 s."""
    trials = [timed(4000, 1.0), timed(4040, 1.04)]
    assert pytest.approx(0.125) == micro_batch_secs(trials, own=trials[0])(500)


@pytest.mark.parametrize("secs", [5.0, 0.5])
def test_neither_intercept_nor_slope_is_negative(secs):
    """A steep or a falling pair of trials promises no time below zero, and no less for more."""
    trials = [timed(10, 1.0), timed(20, secs)]
    law = micro_batch_secs(trials, own=trials[0])
    assert 0.0 <= law(0) <= law(1) <= law(1000)


def test_one_trial_is_taken_in_proportion():
    """A single trial of 10 tokens in 1 s promises 3 s for 30; failed ones do not count."""
    trials = [timed(10, 1.0), timed(30, 0.1, outcome="oom")]
    assert pytest.approx(3.0) == micro_batch_secs(trials, own=trials[0])(30)


@pytest.mark.parametrize("secs", [(1.0, 3.0, 50.0), (3.0, 1.0, 0.1)])
def test_the_faster_of_the_two_worst_micro_batches_is_timed(secs):
    """A hiccup of the host only makes one longer; a third, of other lengths, says nothing."""
    trial = replace(timed(10, 1.0), micro_batch_secs=secs)
    assert pytest.approx(1.0) == micro_batch_secs([trial], own=trial)(10)


def test_a_trials_seconds_grow_with_all_its_micro_batches():
    """Two of 10 tokens took 4 s in all; two of 10 beside one of 20 take 8 s."""
    load = Load(micro_batches=((10,), (10,), (20,)))
    assert pytest.approx(8.0) == predicted_secs([timed(10, 1.0)], load)


def test_a_step_waits_for_its_slowest_rank():
    """Two micro-batches, two ranks, half a second of optimizer; ten steps like the one seen."""
    sample = PlanSample(steps=(((10, 20), (30, 10)),), num_steps=10, num_real_tokens=1)
    own = timed(10, 1.0)
    assert pytest.approx(10 * (2.0 + 3.0 + 0.5)) == estimate_run_secs(sample, [own], own=own)


def test_the_smallest_of_sizes_as_fast_wins():
    """Within 2 % of the best a smaller micro-batch is as good."""
    assert 4 == smallest_close_to_best({2: 90.0, 4: 98.5, 8: 100.0, 16: 99.0})


@pytest.mark.parametrize(
    ("size", "stopped_by", "binding"),
    [
        (8, "oom", "memory"),
        (7, "oom", "memory"),
        (8, "cap", "global_batch"),
        (4, "oom", "host"),
        (8, "plateau", "host"),
    ],
)
def test_binding_says_what_limits(size, stopped_by, binding):
    """Memory and the global batch limit a winner near the largest size that fitted."""
    assert binding == binding_of(size=size, largest=8, stopped_by=stopped_by)


def _one_step_plan(lengths, **size):
    settings = PlanSettings(
        train_batch_size=len(lengths),
        data_parallel_size=1,
        seed=0,
        total_epochs=1,
        total_training_steps=None,
        max_token_len_per_gpu=size.get("budget"),
        micro_batch_size_per_gpu=size.get("rows"),
        use_remove_padding="budget" in size,
    )
    return make_plan(settings, lengths=np.array(lengths), label_tokens=np.array(lengths))


def test_a_load_is_the_worst_micro_batch_twice():
    """Two micro-batches a step, padded as planned: 2 rows x 8 tokens computed."""
    load = load_of(_one_step_plan((5, 3), rows=2))
    assert (Load(micro_batches=((5, 3), (5, 3)), padded_to=8), 16) == (load, load_tokens(load))


def test_a_load_steps_the_long_rows_too():
    """Many short rows have most tokens, one long row the largest square: both are stepped."""
    load = load_of(_one_step_plan((51,) * 20 + (1000,), budget=1020))
    assert Load(micro_batches=((51,) * 20, (51,) * 20, (1000,))) == load


# ---- search, on an arithmetic machine ------------------------------------------


@dataclass(kw_only=True)
class ArithmeticMachine:
    """Steps a load in seconds and bytes that are sums; has a clock that only it moves."""

    limit_bytes: int
    bytes_per_token: int = 1
    base_secs: float = 0.0
    secs_per_token: float = 0.001
    flaky: random.Random | None = None
    error: str | None = None
    error_if: Callable[[Toggles], bool] = lambda toggles: True
    start_secs: float = 0.0  # of another toggle set, and after an out-of-memory
    slowness: Callable[[Toggles], float] = lambda toggles: 1.0
    hangs: Callable[[Toggles], bool] = lambda toggles: False
    fails_again_above: int | None = None  # tokens; a load is then out of memory a second time
    now: float = 0.0
    num_trials: int = 0
    timeouts: list[float] = field(default_factory=list)
    stepped: list[tuple[Toggles, Load]] = field(default_factory=list)
    is_down: bool = True

    def run(self, candidate: Candidate, load: Load, *, timeout_secs: float) -> Trial:
        """Return what a real prober would."""
        self.num_trials += 1
        self.timeouts.append(timeout_secs)
        tokens = load_tokens(load)
        starts = self.is_down or self.stepped[-1][0] != candidate.toggles
        start_secs = self.start_secs if starts else 0.0
        secs = (self.base_secs + self.secs_per_token * tokens) * self.slowness(candidate.toggles)
        if candidate.toggles.gradient_checkpointing == "full":
            secs *= 1.3
        peak = 100 + self.bytes_per_token * tokens
        is_flaky = self.flaky is not None and tokens > 200  # near the limit, at random
        bad = peak > self.limit_bytes or (is_flaky and self.flaky.random() < 0.3)
        is_again = (candidate.toggles, load) in self.stepped
        bad |= is_again and self.fails_again_above is not None and tokens > self.fails_again_above
        is_error = self.error is not None and self.error_if(candidate.toggles)
        outcome = "error" if is_error else "oom" if bad else "ok"
        if start_secs + 4 * secs > timeout_secs or self.hangs(candidate.toggles):
            outcome, start_secs, secs = "timeout", 0.0, timeout_secs / 4
        self.now += start_secs + 4 * secs
        self.stepped.append((candidate.toggles, load))
        self.is_down = outcome != "ok"
        return trial_of(
            load,
            candidate,
            trial_id=f"t{self.num_trials:03d}",
            outcome=outcome,
            message=self.error if is_error else None,
            memory_limit_bytes=self.limit_bytes,
            peak_reserved_bytes=peak,
            step_secs=(2 * secs, 2 * secs) if outcome == "ok" else (),
            micro_batch_secs=(secs, secs),
            optimizer_secs=0.01,
            seconds=start_secs + 4 * secs,
        )


def run_search(model, out_dir, machine, *, overrides=(), fixed=(), seconds=None, plans=plan_of):
    return search(
        config=resolve(config_of(model, *overrides)),
        spec=read_model_spec(model),
        prober=machine,
        plan_of=plans,
        num_ranks=1,
        fixed_keys=fixed,
        seconds=seconds,
        out_dir=out_dir,
        clock=lambda: machine.now,
    )


def test_a_search_below_the_limit_is_bound_by_the_global_batch(model, tmp_path):
    """With memory to spare and a cost a micro-batch, the whole batch of a rank is best."""
    result = run_search(model, tmp_path, ArithmeticMachine(limit_bytes=10**6, base_secs=1.0))
    assert ("global_batch", "cap") == (result.binding, result.stopped_by)
    assert result.winner.candidate.toggles.gradient_checkpointing == "none"


def test_a_search_at_the_limit_is_bound_by_memory(model, tmp_path):
    """The winner of a padding-free set is the largest whose load fits."""
    machine = ArithmeticMachine(limit_bytes=600, base_secs=1.0)
    result = run_search(model, tmp_path, machine, fixed=ONE_SET)
    assert ("memory", "oom") == (result.binding, result.stopped_by)
    fitted = max(t.peak_reserved_bytes for t in result.trials if fits(t))
    failed = min(t.peak_reserved_bytes for t in result.trials if t.outcome == "oom")
    assert 0 < failed - fitted < 8


def test_row_counts_are_exact(model, tmp_path):
    """The largest padded candidate fits and one row more does not: both were stepped."""
    machine = ArithmeticMachine(limit_bytes=900, base_secs=1.0)
    result = run_search(
        model, tmp_path, machine, overrides=["model.use_remove_padding=false"], fixed=ONE_SET
    )
    outcomes = {t.candidate.size: t.outcome for t in result.trials}
    size = result.searched[0].largest
    assert ("ok", "oom") == (outcomes[size], outcomes[size + 1])


def test_a_bigger_size_that_is_no_faster_is_not_taken(model, tmp_path):
    """Where seconds grow with tokens alone, the host binds and the smallest size wins."""
    machine = ArithmeticMachine(limit_bytes=10**6)
    plans = lambda candidate: plan_of(candidate, num_rows=400, batch=400)  # noqa: E731
    result = run_search(model, tmp_path, machine, fixed=ONE_SET, plans=plans)
    assert "host" == result.binding
    assert result.winner.candidate.size < result.searched[0].largest


def test_costly_trials_end_on_a_plateau(model, tmp_path):
    """Two doublings that gain nothing are enough where a trial takes long."""
    machine = ArithmeticMachine(limit_bytes=10**6, secs_per_token=0.01)
    plans = lambda candidate: plan_of(candidate, num_rows=400, batch=400)  # noqa: E731
    result = run_search(model, tmp_path, machine, fixed=ONE_SET, plans=plans)
    assert ("plateau", "host", 3) == (result.stopped_by, result.binding, machine.num_trials)


def test_fallbacks_are_the_best_of_the_other_toggle_sets(model, tmp_path):
    """The fastest first, one of each other set."""
    result = run_search(model, tmp_path, ArithmeticMachine(limit_bytes=700, base_secs=1.0))
    speeds = [result.tokens_per_sec[t.trial_id] for t in (result.winner, *result.fallbacks)]
    assert sorted(speeds, reverse=True) == speeds
    assert 8 == len({toggle_set_name(t.candidate.toggles) for t in result.fallbacks}) + 1


def test_the_winner_was_stepped_with_the_worst_micro_batch_of_its_plan(model, tmp_path):
    """Its certificate is a proof, by its own trial."""
    machine = ArithmeticMachine(limit_bytes=700, base_secs=1.0)
    winner = run_search(model, tmp_path, machine).winner
    plan = plan_of(winner.candidate)
    certificate = certify(plan, winner)
    assert winner.trial_id == certificate.proven_by
    assert worst_micro_batch(plan)[1] == certificate.worst


def test_another_load_is_no_proof():
    """A trial that stepped something else than the worst micro-batch proves nothing."""
    candidate = candidate_at(PACKED, 200)
    trial = trial_of(Load(micro_batches=((5,), (5,))), candidate)
    assert certify(plan_of(candidate), trial).proven_by is None


def test_trials_are_written_as_they_land_and_anew_for_each_search(model, tmp_path):
    """trials.jsonl holds the trials of this search, in order."""
    for _ in range(2):
        result = run_search(model, tmp_path, ArithmeticMachine(limit_bytes=600), fixed=ONE_SET)
    written = [row["trial_id"] for row in read_jsonl(tmp_path / "trials.jsonl")]
    assert [trial.trial_id for trial in result.trials] == written


def test_nothing_fits_says_what_was_tried_and_what_to_do(model, tmp_path):
    """Exit code 3: smallest sizes, peak reached, bytes of the state, remedies."""
    machine = ArithmeticMachine(limit_bytes=2 * state_bytes(model), bytes_per_token=10**9)
    with pytest.raises(NothingFitsError) as caught:
        run_search(model, tmp_path, machine)
    words = str(caught.value)
    assert 3 == caught.value.exit_code
    for part in ("1 row", "tokens", "passed", "x 16 bytes", "--max-length", "--memory-limit"):
        assert part in words


# (limit in bytes a parameter, what is named, what would not help)
@pytest.mark.parametrize(
    ("bytes_per_parameter", "named", "unnamed"),
    [
        (12, ("state_dtype=bf16", "LoRA"), ("--max-length", "gradient_checkpointing")),
        (6, ("LoRA",), ("--max-length", "state_dtype")),
        (1, ("more GPUs",), ("--max-length", "state_dtype", "LoRA")),
    ],
)
def test_a_state_above_the_limit_names_only_what_helps(
    model, tmp_path, bytes_per_parameter, named, unnamed
):
    """Shorter rows and checkpointing save activations, which are not what is too large."""
    limit = bytes_per_parameter * state_bytes(model) // 16
    machine = ArithmeticMachine(limit_bytes=limit, bytes_per_token=10**9)
    with pytest.raises(NothingFitsError) as caught:
        run_search(model, tmp_path, machine)
    remedies = str(caught.value).rpartition("; try ")[2]
    assert [True] * len(named) == [word in remedies for word in named]
    assert [False] * len(unnamed) == [word in remedies for word in unnamed]


def state_bytes(model) -> int:
    """Return the bytes of fp32 weights, gradients and moments."""
    return 16 * num_parameters(read_model_spec(model))


def test_time_that_ends_before_anything_fitted_is_said(model, tmp_path):
    """It is not told as a lack of memory."""
    machine = ArithmeticMachine(limit_bytes=10**6, base_secs=100.0)
    with pytest.raises(RunError, match="--seconds"):
        run_search(model, tmp_path, machine, seconds=50)


@pytest.mark.parametrize("seconds", [20.0, 60.0, 300.0])
def test_a_search_keeps_to_its_seconds(model, tmp_path, seconds):
    """No trial is started that is predicted to end too late, none may run past the end."""
    machine = ArithmeticMachine(limit_bytes=10**6, base_secs=0.5, secs_per_token=0.01)
    result = run_search(model, tmp_path, machine, seconds=seconds)
    assert machine.now <= seconds
    assert fits(result.winner)


def test_an_error_ends_the_search_at_once(model, tmp_path):
    """Only a real out-of-memory shrinks the size; a bug is told in its own words."""
    machine = ArithmeticMachine(limit_bytes=10**6, error="RuntimeError: shape mismatch")
    with pytest.raises(RunError, match="shape mismatch"):
        run_search(model, tmp_path, machine)
    assert 1 == machine.num_trials


@pytest.mark.parametrize("seed", range(5))
def test_a_flaky_size_is_stepped_twice_before_it_wins(model, tmp_path, seed):
    """Of a machine that fails at random, a winner at the edge of memory fitted twice."""
    machine = ArithmeticMachine(limit_bytes=700, base_secs=1.0, flaky=random.Random(seed))
    result = run_search(model, tmp_path, machine, fixed=ONE_SET)
    again = [t for t in result.trials if t.candidate == result.winner.candidate]
    assert [True] * (2 if result.stopped_by == "oom" else 1) == [fits(t) for t in again]
    assert machine.num_trials < 40


def test_a_fixed_size_is_the_only_size(model, tmp_path):
    """What the user fixed is stepped as it is."""
    result = run_search(
        model,
        tmp_path,
        ArithmeticMachine(limit_bytes=10**6),
        overrides=["data.max_token_len_per_gpu=300"],
        fixed={"data.max_token_len_per_gpu"},
    )
    assert {300} == {trial.candidate.max_token_len_per_gpu for trial in result.trials}


# ---- search, under a budget of time -----------------------------------------------


@pytest.fixture
def gpu_search(model, tmp_path):
    """Sixteen toggle sets (no Liger) on an arithmetic GPU whose processes take 10 s to start."""

    def run(machine, **arguments):
        plans = lambda candidate: plan_of(candidate, num_rows=400, batch=400)  # noqa: E731
        cuda = ("trainer.device=cuda", "model.use_liger=false")
        fixed = ("model.use_liger", *arguments.pop("fixed", ()))
        return run_search(
            model, tmp_path, machine, overrides=cuda, fixed=fixed, plans=plans, **arguments
        )

    return run


def selective_is_fastest(toggles: Toggles) -> float:
    fastest = toggles.use_remove_padding and toggles.gradient_checkpointing == "selective"
    return 1.0 if fastest else 1.5


def test_the_first_set_on_a_gpu_starts_at_a_size_that_tells_its_speed(gpu_search):
    """A quarter of the largest useful size, halved where it does not fit."""
    result = gpu_search(ArithmeticMachine(limit_bytes=4000, base_secs=0.1), fixed=ONE_SET)
    largest = sum(plan_of(result.winner.candidate, num_rows=400, batch=400).lengths)
    sizes = [trial.candidate.size for trial in result.trials]
    assert [largest // 4, largest // 8] == sizes[:2]


@pytest.mark.parametrize("seconds", [120.0, 240.0])
def test_sets_of_a_form_are_screened_at_one_size_on_a_gpu(gpu_search, seconds):
    """Where the host decides how long a step takes, smaller sizes are not tried to save time."""
    machine = ArithmeticMachine(
        limit_bytes=10**6, base_secs=0.5, secs_per_token=1e-5, start_secs=2.0
    )
    result = gpu_search(machine, seconds=seconds)
    first: dict[bool, dict[Toggles, int]] = {True: {}, False: {}}
    for trial in result.trials:
        toggles = trial.candidate.toggles
        first[toggles.use_remove_padding].setdefault(toggles, trial.candidate.size)
    assert [1, 1] == [len(set(sizes.values())) for sizes in first.values()]
    assert 12 < sum(map(len, first.values()))


@pytest.mark.parametrize("seconds", [200.0, 300.0, 450.0])
def test_the_fastest_set_is_found_and_searched_within_the_seconds(gpu_search, seconds):
    """Screened among the first, then searched to the limit: not the first set wins."""
    machine = ArithmeticMachine(
        limit_bytes=4000,
        base_secs=0.2,
        secs_per_token=0.0001,
        start_secs=10.0,
        slowness=selective_is_fastest,
    )
    result = gpu_search(machine, seconds=seconds)
    assert machine.now <= seconds
    assert "selective" == result.winner.candidate.toggles.gradient_checkpointing
    assert result.winner.candidate.size > 0.95 * (4000 - 100)
    assert all(fits(t) for t in result.trials if t.trial_id in result.tokens_per_sec)


def test_a_slow_set_needs_no_exact_limit_under_a_budget(gpu_search):
    """More than a quarter behind after screening: one trial and its restarts, stopped by time."""
    machine = ArithmeticMachine(
        limit_bytes=4000, base_secs=0.2, start_secs=10.0, slowness=selective_is_fastest
    )
    result = gpu_search(machine, seconds=600)
    slow = [s for s in result.searched if selective_is_fastest(s.toggles) > 1]
    assert {"time"} == {s.stopped_by for s in slow if s.tokens_per_sec}
    assert machine.now < 600


def test_without_a_budget_every_set_is_exact(gpu_search):
    """Memory or the cap ends every one."""
    machine = ArithmeticMachine(limit_bytes=2000, base_secs=0.2, secs_per_token=0.0001)
    result = gpu_search(machine, seconds=None)
    assert (16, {"oom"}) == (len(result.searched), {s.stopped_by for s in result.searched})


def test_a_set_that_hangs_does_not_take_the_time_of_the_others(gpu_search):
    """Once something fitted, a first trial is given a minute at least, or three shares."""
    hangs = lambda toggles: toggles.loss_kernel == "logits"  # noqa: E731
    machine = ArithmeticMachine(
        limit_bytes=4000, base_secs=0.2, secs_per_token=0.0001, start_secs=10.0, hangs=hangs
    )
    result = gpu_search(machine, seconds=500)
    assert machine.now <= 500
    hanging = [n for n, trial in enumerate(result.trials) if trial.outcome == "timeout"]
    assert 60.0 == machine.timeouts[hanging[0]]
    assert 1 < len({t.candidate.toggles for t in result.trials if fits(t)})


# (seconds of its share, seconds by the trials of other sets) -> seconds allowed
@pytest.mark.parametrize(
    ("share_secs", "expected", "secs"),
    [(6.0, None, 900.0), (6.0, 12.0, 60.0), (40.0, 12.0, 120.0), (6.0, 90.0, 270.0)],
)
def test_a_first_trial_is_bounded_once_something_fitted(share_secs, expected, secs):
    """By a minute, three shares, or three times what others took; before, by a quarter hour."""
    assert secs == first_timeout_secs(share_secs=share_secs, expected=expected)


@pytest.mark.parametrize(
    ("changes", "device", "starts"),
    [
        ({"outcome": "oom"}, "cpu", False),
        ({"outcome": "oom"}, "cuda", True),
        ({"outcome": "oom", "data_parallel_size": 2, "simulated_ranks": 2}, "cpu", True),
        ({"outcome": "timeout"}, "cpu", True),
        ({}, "cuda", False),
    ],
)
def test_an_out_of_memory_costs_a_start_but_of_one_rank_on_the_cpu(changes, device, starts):
    """The account of the CPU leaves a process sound; all others end."""
    assert starts == starts_child(timed(10, 1.0, **changes), PACKED, device=device)


def test_a_start_takes_the_median_of_the_trials_that_started_and_fitted():
    """10, 12 and 90 s of start make 12; a trial without a start and a hanging one say nothing."""
    others = [replace(PACKED, gradient_checkpointing=form) for form in ("selective", "full")]
    trials = [timed(10, 1.0, seconds=14.0), timed(20, 1.0, seconds=4.0)]
    for toggles, secs in zip(others, (16.0, 94.0), strict=True):
        trials.append(replace(trials[0], candidate=candidate_at(toggles, 10), seconds=secs))
    hanging = candidate_at(replace(PACKED, loss_kernel="logits"), 10)
    trials.append(replace(trials[0], candidate=hanging, seconds=900.0, outcome="timeout"))
    assert 12.0 == start_secs(trials, device="cuda")


# ---- search, where settings are refused or sizes rejected -----------------------


def test_a_refused_set_is_left_out_with_the_engines_sentence(model, tmp_path):
    """The others are searched as if it had not been there."""
    machine = ArithmeticMachine(
        limit_bytes=700,
        base_secs=1.0,
        error="ConfigError: logits need a kernel; use chunked",
        error_if=lambda toggles: toggles.loss_kernel == "logits",
    )
    result = run_search(model, tmp_path, machine)
    refused = {k: v for k, v in result.left_out.items() if "logits" in k}
    assert {"logits need a kernel; use chunked"} == set(refused.values())
    assert (4, 4) == (len(refused), len(result.searched))


@pytest.mark.parametrize("fixed", [(), ONE_SET])
def test_a_setting_that_every_set_shares_is_refused_at_once(model, tmp_path, fixed):
    """Two sets that differ in all that is searched are enough to tell."""
    machine = ArithmeticMachine(limit_bytes=700, error="ConfigError: offload=x is refused; use y")
    with pytest.raises(ConfigError, match=r"^offload=x is refused; use y$"):
        run_search(model, tmp_path, machine, fixed=fixed)
    assert machine.num_trials <= 2


def test_a_model_that_cannot_be_built_ends_the_search(model, tmp_path):
    """The model is the same for every toggle set."""
    machine = ArithmeticMachine(limit_bytes=700, error="ModelError: no such layer")
    with pytest.raises(ConfigError, match="no such layer"):
        run_search(model, tmp_path, machine)
    assert 1 == machine.num_trials


def test_a_rejected_winner_leaves_the_evidence(model, tmp_path):
    """Nothing from the rejected size up is a limit, a best trial or a speed any more."""
    machine = ArithmeticMachine(limit_bytes=600, base_secs=1.0, fails_again_above=300)
    result = run_search(model, tmp_path, machine, fixed=ONE_SET)
    (searched,) = result.searched
    fitted = {t.candidate for t in result.trials if fits(t)}
    rejected = min(t.candidate.size for t in result.trials if t.outcome == "oom")
    assert rejected in {candidate.size for candidate in fitted}
    told = [t.candidate.size for t in result.trials if t.trial_id in result.tokens_per_sec]
    assert max(told) == searched.largest < rejected
    assert load_tokens(result.winner.load) <= 300


def test_memory_binds_a_winner_below_a_rejected_size(model, tmp_path):
    """The size that failed its second step is the reason."""
    machine = ArithmeticMachine(limit_bytes=600, base_secs=1.0, fails_again_above=400)
    result = run_search(model, tmp_path, machine, fixed=ONE_SET)
    assert "memory" == result.binding
    assert "ran out of memory" in result.reason


@pytest.mark.parametrize(
    ("others", "stopped_by", "binding", "why"),
    [
        ([], "time", "host", "the time ended before a larger one was tried"),
        ([{"outcome": "oom"}], "time", "memory", "the time ended before a size between"),
        ([{"outcome": "timeout"}], "time", "host", "did not end in time"),
        ([], "cap", "global_batch", "no larger micro-batch"),
    ],
)
def test_the_reason_is_what_was_seen(others, stopped_by, binding, why):
    """Memory binds if a larger size failed, the global batch at the cap; time is said."""
    trials = [timed(100, 1.0), *(timed(200, 1.0, **changes) for changes in others)]
    found = judge_winner(trials[0], trials=trials, speed=1.0, stopped_by=stopped_by)
    assert (binding, True) == (found[0], why in found[1])


# ---- verdict -----------------------------------------------------------------


def flat(config) -> dict:
    plain = {k: v for k, v in config.items() if k not in ("tuning", "schema_version")}
    return {f"{s}.{key}": v for s, section in plain.items() for key, v in section.items()}


@pytest.fixture
def verdict(model, tmp_path):
    config = config_of(model, "optim.lr=3e-4", "data.train_batch_size=20", "model.init=random")
    result = run_search(model, tmp_path, ArithmeticMachine(limit_bytes=700, base_secs=1.0))
    return {
        "config": config,
        "result": result,
        "certificate": certify(plan_of(result.winner.candidate), result.winner),
        "gpu": "cpu",
        "spec": read_model_spec(model),
        "environment": {"torch": "2.13.0", "transformers": "5.24.0", "liger_kernel": None},
    }


def test_tuning_writes_nothing_but_tunable_keys(verdict):
    """What is learned cannot change: only TUNABLE_KEYS and the number of ranks differ."""
    before, after = flat(verdict["config"]), flat(tuned_config(**verdict))
    changed = {key for key in before if before[key] != after[key]}
    assert changed <= {*TUNABLE_KEYS, "trainer.nproc_per_node", "trainer.nnodes"}


def test_a_verdict_reads_back_as_the_winner(verdict, tmp_path):
    """The written config holds the winner's candidate, with its evidence below."""
    winner = verdict["result"].winner
    path = write_verdict(**verdict, path=tmp_path / "tuned.yaml")
    assert winner.candidate == candidate_of(resolve(load_config(path)))
    tuning = yaml.safe_load(path.read_text())["tuning"]
    assert winner.trial_id == tuning["winner"]["trial_id"] == tuning["certificate"]["proven_by"]
    assert {"binding", "reason", "fallbacks", "law_key", "searched"} <= set(tuning)


# ---- search, on real steps ---------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_a_real_search_ends_where_memory_does(model, tmp_path, packed):
    """Under a real limit the largest size was stepped and fits; the next was stepped and fails."""
    limit = 6 * MIB
    config = config_of(model, f"model.use_remove_padding={packed}", "model.loss_kernel=logits")
    with ProbeRunner(
        out_dir=tmp_path / "probes",
        config=config,
        num_ranks=1,
        memory_limit_bytes=limit,
        environment={},
    ) as runner:
        result = search(
            config=resolve(config),
            spec=read_model_spec(model),
            prober=runner,
            plan_of=lambda candidate: plan_of(candidate, batch=60),
            num_ranks=1,
            fixed_keys=ONE_SET,
            seconds=None,
            out_dir=tmp_path,
        )
    (searched,) = result.searched
    assert "oom" == searched.stopped_by
    fitting = [trial for trial in result.trials if fits(trial)]
    failing = [trial for trial in result.trials if trial.outcome == "oom"]
    assert max(t.peak_reserved_bytes for t in fitting) <= limit
    first_failing = min(failing, key=lambda t: t.candidate.size)
    last_fitting = max(fitting, key=lambda t: load_tokens(t.load))
    between = load_tokens(first_failing.load) - load_tokens(last_fitting.load)
    assert searched.largest + 1 == first_failing.candidate.size or (packed and between < 8)


def test_a_first_step_that_makes_kernels_predicts_no_step():
    """On a GPU the first step takes ten seconds more, whatever the load."""
    from autobatch.tuning.speed import predicted_secs, steps_secs

    trial = trial_of(Load(micro_batches=((100,), (100,))), step_secs=(12.0, 1.1, 1.0), seconds=20.0)
    assert 3.0 == steps_secs(trial)
    assert 6.0 == predicted_secs([trial], Load(micro_batches=((200,), (200,))))
