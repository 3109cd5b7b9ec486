"""The page: whole, escaped, and in need of nothing else."""

import html.parser
import re

from jaxtpu.plan.breakdown import PARTS, UNEXPLAINED
from jaxtpu.plan.host import DeviceMemory, HostMemory
from jaxtpu.plan.page import SliceSection, memory_rows, write_page
from jaxtpu.plan.pictures import TimeBar, time_png, timeline_png
from tests.plan.snippets import MIB
from tests.plan.test_breakdown import step
from tests.plan.test_pictures import report

VERSIONS = {"jax": "0.12.0.1", "libtpu": "0.0.50.1"}
HOST = HostMemory(882 * MIB, 1358 * MIB, 0, 28 * 1024 * MIB, 6 * MIB, 23 * 1024 * MIB, None)
ROW = {
    "slice": "v3-8",
    "mesh": {"data": 1, "fsdp": 8},
    "model.remat": "dots",
    "train.microbatches": 4,
    "fits": True,
    "hbm_gib": 5.92,
    "reason": "",
    "kind": "predicted",
    "step_seconds": 4.05,
    "mfu": 0.312,
    "hfu": 0.41,
    "tokens_per_second": 16200.0,
    "exposed_communication_seconds": None,
    "dollars_per_billion_tokens": None,
    "days": 12.34,
}
OVER = ROW | {"fits": False, "train.microbatches": 1, "reason": "needs 9 of 8 GiB <by far>"}
ESTIMATED = ROW | {"fits": None, "mesh": {"data": 1}, "kind": "estimated", "hbm_gib": 3.0}


class Balance(html.parser.HTMLParser):
    """Checks that what is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(path, *sections, **options) -> str:
    write_page(path / "plans" / "report.html", sections, title="7B & <more>", **options)
    text = (path / "plans" / "report.html").read_text(encoding="utf-8")
    checked = Balance()
    checked.feed(text)
    assert not checked.open and not {"script", "link", "iframe"} & set(checked.seen)
    assert "http" not in text and "url(" not in text
    return text


def test_a_whole_page(tmp_path):
    told = report(step())
    section = SliceSection(
        name="v3-8",
        summary="8 devices",
        rows=[ROW, OVER, ESTIMATED],
        reasons=["Not 23 more with remat=none."],
        command="--config.mesh.fsdp=8",
        memory=memory_rows({"train": told}, 16 * MIB, DeviceMemory(MIB, 2 * MIB, 3), HOST),
        report=told,
        timeline_png=timeline_png(told, 2**30, "A step"),
        time_png=time_png([TimeBar("fsdp 8", {"attention": 1.0})], "Time"),
    )
    text = page(tmp_path, section, versions=VERSIONS, notes=["Prices of 2025-12."])
    assert "<h1>7B &amp; &lt;more&gt;</h1>" in text
    assert "Compiled with jax 0.12.0.1, libtpu 0.0.50.1." in text
    assert text.count("data:image/png;base64,") == 2
    assert text.count('class="best"') == 1 and text.count('class="over"') == 1
    assert "fsdp 8, dots, 4 microbatches" in text and "one device, dots, 4 microbatches" in text
    assert "Not fsdp 8, dots, 1 microbatch: it needs 9 of 8 GiB &lt;by far&gt;." in text
    for part in PARTS:
        assert (f"<td>{part}</td>" in text) == bool(told.parts[part] or part == UNEXPLAINED)
    assert "4 MiB f32[1024,1024] weight copy, head/kernel, forward" in text
    assert "512 KiB of 1 MiB f32[2048,64] saved activation" in text
    for words in ("restore", "save", "host RAM of a process", "Prices of 2025-12."):
        assert words in text


def test_what_is_missing_is_left_out(tmp_path):
    text = page(tmp_path, SliceSection("v3-8"), versions={})
    assert "Nothing was compiled." in text
    titles = re.findall("<h[23]>(.*?)</h[23]>", text)
    assert titles == ["v3-8"]


def test_memory_of_programs_and_of_the_host():
    told = report(step())
    rows = memory_rows({"train": told}, 16 * MIB, DeviceMemory(MIB, 2 * MIB, 3), HOST)
    assert [(row.what, row.bytes, row.available, row.label) for row in rows] == [
        ("train", told.hbm_bytes, 16 * MIB, "compiled"),
        ("restore", MIB, 16 * MIB, "estimated"),
        ("save", 2 * MIB, 16 * MIB, "estimated"),
        ("ready batches", 3, 16 * MIB, "estimated"),
        ("host RAM of a process", HOST.total, None, "estimated"),
    ]
    assert "checkpoint 28 GiB" in rows[-1].note and "offloaded" not in rows[-1].note
    assert memory_rows({}, 1) == []
