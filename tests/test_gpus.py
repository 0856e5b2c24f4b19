"""Cards by name, cards that are here, what a process may take of one, torch's allocator setting."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from autobatch.cli import main
from autobatch.errors import AutobatchError, ConfigError
from autobatch.hardware.environment import allocator_environment, describe
from autobatch.hardware.limit import gpu_memory_limit
from autobatch.hardware.named import all_gpus, named_gpu, read_gpu
from autobatch.hardware.present import (
    Nvml,
    PresentGpu,
    driver_version,
    named_of,
    present_gpus,
)
from autobatch.reporting import as_text, present_gpus_table
from autobatch.storage import shipped_dir
from autobatch.units import GIB

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

# ---- by name ---------------------------------------------------------------


@pytest.mark.parametrize("spec", all_gpus(), ids=lambda spec: spec.name)
def test_a_card_is_well_formed(spec: Any) -> None:
    """File name, sticker, types and ranges agree: a slip of a power of ten is caught."""
    assert (shipped_dir("gpus") / f"{spec.name}.yaml").exists()
    sticker = int(spec.name.rpartition("-")[2].removesuffix("g"))
    assert 0.9 * sticker < spec.visible_memory_bytes / GIB < sticker
    assert isinstance(spec.visible_memory_bytes, int)
    assert isinstance(spec.non_torch_bytes, int)
    assert spec.bf16_flops_per_sec is None or 5e13 < spec.bf16_flops_per_sec < 5e15
    assert 1e11 < spec.memory_bytes_per_sec < 1e13
    assert 1e10 < spec.interconnect_bytes_per_sec < 2e12
    assert 7.0 <= float(spec.compute_capability) <= 12.0
    assert (float(spec.compute_capability) < 8) == (spec.bf16_flops_per_sec is None)
    assert spec.source
    assert date.fromisoformat(spec.checked_on)


def test_names_are_unique_and_sorted() -> None:
    """Neither our name nor the vendor's names two cards."""
    names = [spec.name for spec in all_gpus()]
    assert sorted(set(names)) == names
    assert len(names) == len({spec.vendor_name.lower() for spec in all_gpus()})


@pytest.mark.parametrize(
    "name", ["a100-80g", "A100-80G", "NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb", " a100-80g "]
)
def test_a_card_is_found_by_either_name(name: str) -> None:
    """Ours, or what nvidia-smi prints, with or without the brand, in any case."""
    assert 84987740160 == named_gpu(name).visible_memory_bytes


@pytest.mark.parametrize(
    ("name", "nearest"), [("a100-80", "a100-80g"), ("h100", "h100-80g"), ("RTX 4090", "rtx4090")]
)
def test_an_unknown_card_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    """One sentence with the value, the nearest names, the list."""
    with pytest.raises(ConfigError, match=f"{name!r} is not known; did you mean .*{nearest}") as e:
        named_gpu(name)
    assert "\n" not in str(e.value)
    assert all(spec.name in str(e.value) for spec in all_gpus())


@pytest.mark.parametrize("text", ["name: [", "- 1", "name: x"])
def test_a_damaged_card_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    """A hand-edited file never ends in a traceback."""
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(AutobatchError, match="write it again") as caught:
        read_gpu(path)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_of_records_is_said() -> None:
    """An incomplete installation names its cure."""
    with pytest.raises(AutobatchError, match="install autobatch-sft again"):
        shipped_dir("no-such-records")


# ---- here ------------------------------------------------------------------


@dataclass
class Card:
    """What NVML would tell of one device."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    bus: str = "00000000:07:00.0"
    total: int = 80 * GIB
    reserved: int = GIB
    used: int = 0
    cores: int = 6912
    slices: list[Card] | None = None  # a list: the card is in MIG mode
    lost: bool = False


@dataclass
class FakeNvml:
    """NVIDIA's management library, told from data; a handle is the card itself."""

    cards: list[Card] = field(default_factory=list)
    has_driver: bool = True
    has_memory_v2: bool = True
    open_sessions: int = 0

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 0x02000028

    def _refuse_unless(self, answer: bool) -> None:
        if not answer:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self._refuse_unless(self.has_driver)
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        self._refuse_unless(not self.cards[index].lost)
        return self.cards[index]

    def nvmlDeviceGetUUID(self, handle: Card) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Card) -> str:
        return handle.name

    def nvmlDeviceGetPciInfo(self, handle: Card) -> Any:
        return SimpleNamespace(busId=handle.bus)

    def nvmlDeviceGetMemoryInfo(self, handle: Card, version: int | None = None) -> Any:
        if version is None:
            used = handle.used + handle.reserved
            return SimpleNamespace(total=handle.total, used=used, free=handle.total - used)
        self._refuse_unless(self.has_memory_v2)
        free = handle.total - handle.reserved - handle.used
        return SimpleNamespace(
            total=handle.total, reserved=handle.reserved, used=handle.used, free=free
        )

    def nvmlDeviceGetNumGpuCores(self, handle: Card) -> int:
        return handle.cores

    def nvmlDeviceGetMaxClockInfo(self, handle: Card, type: int) -> int:
        return 1410

    def nvmlDeviceGetMigMode(self, handle: Card) -> list[int]:
        return [int(handle.slices is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Card, index: int) -> Card:
        slices = handle.slices or []
        self._refuse_unless(index < len(slices))
        return slices[index]


def three() -> FakeNvml:
    """Return a host of three equal cards, told out of bus order."""
    return FakeNvml(
        [
            Card("GPU-aa11", bus="00000000:07:00.0"),
            Card("GPU-cc33", bus="00000000:4E:00.0"),
            Card("GPU-ab22", bus="00000000:0F:00.0"),
        ]
    )


def in_mig_mode() -> FakeNvml:
    """Return a host of a whole card and one that is cut in two slices."""
    slices = [
        Card(f"MIG-{n}f", name="NVIDIA A100-SXM4-80GB MIG 3g.40gb", total=40 * GIB, reserved=0)
        for n in (1, 2)
    ]
    return FakeNvml(
        [Card("GPU-aa11"), Card("GPU-ab22", bus="00000000:0F:00.0", slices=slices)],
    )


def shown(nvml: FakeNvml, visible: str | None = None, order: str | None = None) -> list[str]:
    """Return the end of each visible device's UUID, in CUDA's order."""
    settings = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    environ = {name: value for name, value in settings.items() if value is not None}
    devices = present_gpus(nvml=nvml, environ=environ)
    assert list(range(len(devices))) == [device.index for device in devices]
    assert 0 == nvml.open_sessions
    return [device.uuid.partition("-")[2] for device in devices]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["aa11", "ab22", "cc33"]),
        ("", []),
        ("1", ["ab22"]),
        ("1,0", ["ab22", "aa11"]),
        (" 2 , 0 ", ["cc33", "aa11"]),
        ("0,7,1", ["aa11"]),
        ("-1", []),
        ("0,-1,1", ["aa11"]),
        ("1x,+2", ["ab22", "cc33"]),
        ("NoDevFiles", []),
        ("0,1,0", []),
        ("GPU-cc33", ["cc33"]),
        ("GPU-c,GPU-aa", ["cc33", "aa11"]),
        ("GPU-a", []),
        ("GPU-cc33,1", ["cc33"]),
        ("GPU-cc33,GPU-ff,GPU-aa11", ["cc33"]),
        ("0,GPU-cc33", ["aa11"]),
        ("MIG-1f", []),
    ],
)
def test_visible_devices_are_cuda_s(visible: str | None, expected: list[str]) -> None:
    """Bus order; numbers, UUIDs and their prefixes; the first wrong word ends the list."""
    assert expected == shown(three(), visible)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["1f"]),
        ("0", ["aa11"]),
        ("1", ["1f"]),
        ("MIG-2f", ["2f"]),
        ("MIG-2f,MIG-1f", ["2f"]),
        ("GPU-ab22", ["1f"]),
    ],
)
def test_a_slice_is_seen_alone(visible: str | None, expected: list[str]) -> None:
    """CUDA shows one MIG slice a process, and a card in MIG mode by its slices only."""
    assert expected == shown(in_mig_mode(), visible)


def test_a_slice_has_its_own_bytes_and_no_named_card() -> None:
    """Neither the whole card's memory nor its name."""
    (device,) = present_gpus(nvml=in_mig_mode(), environ={"CUDA_VISIBLE_DEVICES": "MIG-2"})
    assert device.mig
    assert 40 * GIB == device.total_bytes
    assert named_of(device.vendor_name) is None


def test_a_card_in_mig_mode_without_slices_is_not_seen() -> None:
    """There is nothing on it that a process could use."""
    assert ["aa11"] == shown(FakeNvml([Card("GPU-aa11"), Card("GPU-ab22", slices=[])]))


def test_the_fastest_card_comes_first_unless_the_bus_decides() -> None:
    """CUDA's default order, and CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    nvml = three()
    nvml.cards[1].cores = 20_000
    assert ["cc33", "aa11", "ab22"] == shown(nvml)
    assert ["cc33"] == shown(nvml, "0")
    assert ["aa11", "ab22", "cc33"] == shown(nvml, order="PCI_BUS_ID")


def test_a_lost_card_is_left_out() -> None:
    """One dead card does not hide the others."""
    nvml = three()
    nvml.cards[0].lost = True
    assert ["ab22", "cc33"] == shown(nvml)


def test_memory_is_what_cuda_can_take() -> None:
    """The driver's reserve belongs to nobody; what is used belongs to others."""
    nvml = FakeNvml([Card("GPU-aa11", used=24 * GIB)])
    (card,) = present_gpus(nvml=nvml, environ={})
    assert (79, 55, 24) == tuple(
        n // GIB for n in (card.total_bytes, card.free_bytes, card.used_by_others_bytes)
    )


def test_an_old_driver_counts_its_reserve_as_used() -> None:
    """The older answer has no reserve; what is left is the same."""
    nvml = FakeNvml([Card("GPU-aa11", used=24 * GIB)], has_memory_v2=False)
    (card,) = present_gpus(nvml=nvml, environ={})
    assert 55 * GIB == card.free_bytes == card.total_bytes - card.used_by_others_bytes


def test_nvidia_s_library_has_what_is_asked_of_it() -> None:
    """The fake stands for the real functions: each has its name there."""
    pynvml = pytest.importorskip("pynvml")
    asked = {name for name in dir(FakeNvml) if name.lower().startswith("nvml")}
    assert set() == asked - set(dir(pynvml))
    assert {name for name in dir(Nvml) if name.startswith("nvml")} <= asked | {"nvmlMemory_v2"}


def test_without_a_driver_nothing_is_here() -> None:
    """No exception: no devices, no version."""
    nvml = FakeNvml(has_driver=False)
    assert () == present_gpus(nvml=nvml, environ={})
    assert driver_version(nvml=nvml) is None


def test_this_machine_answers() -> None:
    """The real library, with a driver or without."""
    assert () == present_gpus(environ={"CUDA_VISIBLE_DEVICES": ""})
    assert all(card.total_bytes > 0 for card in present_gpus())


# ---- what a process may take -----------------------------------------------

CARD = PresentGpu(
    index=0,
    uuid="GPU-aa11",
    vendor_name="NVIDIA H200",
    total_bytes=140 * GIB,
    free_bytes=130 * GIB,
    used_by_others_bytes=10 * GIB,
    mig=False,
)


def test_the_whole_card_less_others_and_headroom() -> None:
    """total - used by others - headroom."""
    assert 128 * GIB == gpu_memory_limit(
        card=CARD, named=None, memory_limit_bytes=None, headroom_bytes=2 * GIB
    )


def test_a_larger_card_acts_as_the_named_one() -> None:
    """The smaller of the two counts."""
    a100 = named_gpu("a100-80g")
    limit = gpu_memory_limit(card=CARD, named=a100, memory_limit_bytes=None)
    assert a100.visible_memory_bytes - 10 * GIB == limit


@pytest.mark.parametrize(("asked", "limit"), [(6, 6), (130, 130), (200, 130)])
def test_the_limit_asked_for_is_a_ceiling(asked: int, limit: int) -> None:
    """It lowers the limit and never raises it."""
    assert limit * GIB == gpu_memory_limit(card=CARD, named=None, memory_limit_bytes=asked * GIB)


def test_a_driver_that_shows_a_little_less_is_the_same_card() -> None:
    """total_memory moves with the driver; what is here decides."""
    a100 = named_gpu("a100-80g")
    here = a100.visible_memory_bytes - GIB // 2
    card = replace(CARD, total_bytes=here, used_by_others_bytes=0)
    assert here == gpu_memory_limit(card=card, named=a100, memory_limit_bytes=None)


@pytest.mark.parametrize(
    ("named", "asked", "headroom", "words"),
    [
        ("b200-180g", None, 0, "b200-180g has 178.35 GiB, the NVIDIA H200 here 140.00 GiB"),
        (None, None, 130 * GIB, "leaves nothing to train in; lower --headroom"),
        ("t4-16g", None, 6 * GIB, "10.00 GiB used by others"),
        (None, 0, 0, "not positive"),
    ],
)
def test_an_impossible_limit_is_refused(
    named: str | None, asked: int | None, headroom: int, words: str
) -> None:
    """One sentence with the value, the rule, the next move."""
    spec = None if named is None else named_gpu(named)
    with pytest.raises(ConfigError, match=words) as caught:
        gpu_memory_limit(card=CARD, named=spec, memory_limit_bytes=asked, headroom_bytes=headroom)
    assert "\n" not in str(caught.value)


# ---- torch's allocator -----------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({NEW: ""}, "expandable_segments:True"),
        ({OLD: "max_split_size_mb:512"}, "expandable_segments:True,max_split_size_mb:512"),
        ({NEW: " max_split_size_mb : 512 , "}, "expandable_segments:True,max_split_size_mb:512"),
        ({NEW: "expandable_segments:False"}, "expandable_segments:False"),
        ({OLD: "expandable_segments:False,"}, "expandable_segments:False"),
        (
            {OLD: "backend:native,max_split_size_mb:1", NEW: "max_split_size_mb:2"},
            "expandable_segments:True,backend:native,max_split_size_mb:2",
        ),
        (
            {NEW: "roundup_power2_divisions:[256:1, >:8],max_split_size_mb:9"},
            "expandable_segments:True,roundup_power2_divisions:[256:1,>:8],max_split_size_mb:9",
        ),
    ],
)
def test_the_user_s_allocator_setting_is_kept(environ: dict[str, str], expected: str) -> None:
    """Under either name, over ours, written under both names."""
    assert {NEW: expected, OLD: expected} == allocator_environment(environ)


@pytest.mark.parametrize("text", ["expandable_segments", "max_split_size_mb:", ":1"])
def test_an_allocator_setting_without_a_value_is_refused(text: str) -> None:
    """torch would end every child with a traceback."""
    with pytest.raises(ConfigError, match=f"{NEW} has '{text}', which is no key:value"):
        allocator_environment({NEW: text})


def test_the_environment_names_card_driver_and_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told on CUDA; None on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(OLD, raising=False)
    monkeypatch.setenv(NEW, "max_split_size_mb:512")
    here = describe(device="cuda", nvml=three())
    assert ("NVIDIA A100-SXM4-80GB", "570.86.15") == (here["gpu"], here["driver"])
    assert "expandable_segments:True,max_split_size_mb:512" == here["allocator"]
    on_cpu = describe(device="cpu", nvml=three())
    assert (None, None, None) == (on_cpu["gpu"], on_cpu["driver"], on_cpu["allocator"])


# ---- the command -----------------------------------------------------------


def test_the_command_prints_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named cards whole, and what is here with its name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(main, ["gpus", "--json"])
    assert 0 == result.exit_code, result.stderr
    record = json.loads(result.stdout)
    assert [spec.name for spec in all_gpus()] == [card["name"] for card in record["named"]]
    assert [] == record["present"]


def test_the_command_shows_the_names_and_says_that_nothing_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eighty columns hold each card on one line; no GPU is one clear sentence."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(main, ["gpus"])
    assert 0 == result.exit_code, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("a100-80g ")]
    assert ["a100-80g NVIDIA A100-SXM4-80GB 79.15 312 2,039 600 no"] == [
        " ".join(row.split()) for row in rows
    ]
    assert "no GPU is visible to this process" in result.stdout


def test_a_present_card_is_shown_with_the_name_it_matches() -> None:
    """The card, what others take of it, its UUID."""
    text = as_text(present_gpus_table([CARD], ["h200-141g"], "570.86.15"))
    assert "Here (driver 570.86.15)" in text
    assert "GPU 0  NVIDIA H200, named card: h200-141g" in text
    assert "10.00 GiB used by others" in text
    assert "GPU-aa11" in text


def test_cards_are_looked_up_without_torch() -> None:
    """No parent process imports it."""
    script = (
        "import sys; from autobatch.api import gpus; r = gpus(); "
        "assert len(r.named) >= 17; sys.exit('torch' in sys.modules)"
    )
    repo = Path(__file__).parents[1]
    assert 0 == subprocess.run([sys.executable, "-c", script], cwd=repo, timeout=60).returncode
