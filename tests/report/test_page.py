"""The report: well-formed, complete, small, and nothing of a run is more than text in it."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from mlxlm.cli.main import _run
from mlxlm.families import config_to_hf
from mlxlm.report import read_run, write_report
from mlxlm.utils.errors import CheckpointError, ConfigError

NASTY = "Once </script><script>document.title='owned'</script><img src=http://example.com/x onerror=alert(1)> \x1b[31m"
VOID = {"meta", "input", "br", "img", "link"}


def make_run(path, tiny_config, steps=50, settings=None, **more):
    """A run's folder as a training leaves it, but for checkpoints."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config_to_hf(tiny_config)))
    values = {"steps": steps, "learning_rate": 1e-3, "grad_clip": 0.5, **(settings or {})}
    (path / "train.json").write_text(json.dumps({"settings": values, "data": "data", "data_digest": ""}))
    (path / "data").mkdir()
    (path / "data/manifest.json").write_text(json.dumps({"train": {"tokens": 12345, "bytes": 50000, "shards": []}}))
    entries = [{"event": "started", "step": 0, "parameters": 654321, "time": "2026-01-02T03:04:05+00:00"}]
    for i in range(1, steps + 1):
        loss = 9.75 if i == steps // 2 else 5 / math.sqrt(i) + 0.1 * (i % 3)
        entries.append({
            "event": "step", "step": i, "tokens": 100 * i, "seconds": 0.5 * i, "loss": loss, "learning_rate": 1e-3,
            "grad_norm": 1.0 + i % 2, "tokens_per_second": 200.0 * (i > 1), "memory": 10**9 + i,
        })  # fmt: skip
        if i % 10 == 0:
            entries.append({"event": "validation", "step": i, "loss": loss - 0.1, "bits_per_byte": loss / 3})
            entries.append({"event": "sample", "step": i, "prompt": "", "text": f"{NASTY} of step {i}"})
    entries.append({"event": "paused", "step": 20, "reason": "<b>battery</b>", "time": "2026-01-02T03:04:06+00:00"})
    entries.append({"event": "resumed", "step": 20, "reason": "<b>battery</b>", "seconds": 75.0, "time": "x"})
    (path / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [*entries, *more.get("entries", ())]))
    return path


def defaults(steps):
    return {"grad_clip": 1.0, "seed": 0}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects them and their text."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts = [], [], {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def written(tmp_path, *runs):
    write_report([read_run(run) for run in runs], tmp_path / "out.html", defaults)
    return (tmp_path / "out.html").read_text(encoding="utf-8")


def test_one_run(tmp_path, tiny_config):
    html = written(tmp_path, make_run(tmp_path / "my run", tiny_config))
    page = Page(html)
    assert page.texts["h1"] == ["my run"]
    cells = page.texts["td"]
    for expected in ("654k", "50", "5k", "25s", "200", "1 GB", "12345", "paused: <b>battery</b>", "0.5"):
        assert expected in cells, expected
    assert "continued: <b>battery</b>, after 1m15s" in cells
    assert list(page.texts["summary"]) == [f"step {n}" for n in (50, 40, 30, 20, 10)]
    assert page.texts["pre"][0] == NASTY.replace("\x1b", "\ufffd") + " of step 50"
    assert sum('class="changed"' in line for line in html.split("<tr")) == 1  # clip, of all settings
    drawn = {a.get("data-name") for a in page.all("polyline")}
    assert {"my run each step", "my run smoothed", "my run validation", "my run"} == drawn
    captions = page.texts["figcaption"]
    assert captions == ["loss (nats per token)", "validation (bits per byte)", "learning rate", "gradient norm",
                        "tokens per second", "memory"]  # fmt: skip


def test_page_is_self_contained_and_escaped(tmp_path, tiny_config):
    page = Page(written(tmp_path, make_run(tmp_path / "<img src=x>", tiny_config, settings={"<i>": "<script>"})))
    assert len(page.all("script")) == 1 and not page.all("img") and not page.all("link") and not page.all("i")
    for _, attributes in page.elements:
        assert not {"src", "href", "onerror", "onclick"} & set(attributes)
    [policy] = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_several_runs_side_by_side(tmp_path, tiny_config):
    runs = [make_run(tmp_path / n, tiny_config, settings={"seed": i}) for i, n in enumerate("abcdefghij")]
    html = written(tmp_path, *runs)
    page = Page(html)
    assert page.texts["h1"] == ["10 runs"]
    at = page.texts["td"].index("seed")
    assert page.texts["td"][at : at + 11] == ["seed", *map(str, range(10))]
    assert "grad_clip" not in page.texts["td"][: at + 11]  # the same in all
    assert not [a for a in page.all("polyline") if "faint" in a["class"]]
    assert {a["class"] for a in page.all("polyline") if a.get("data-name") == "j"} == {
        "c1 line second", "c1 dots second",
    }  # fmt: skip
    assert len(html) < 1_000_000


def test_long_runs_are_downsampled_and_keep_their_peak(tmp_path, tiny_config):
    run = make_run(tmp_path / "run", tiny_config, steps=4_000)
    html = written(tmp_path, run)
    assert len(html) < 300_000
    raw = re.search(r'data-name="run each step" points="([^"]*)"', html)[1].split()
    assert 1000 < len(raw) <= 1200
    heights = [float(p.split(",")[1]) for p in raw]
    # 9.75 at step 2,000 is the one value far above its neighbours: the middle of the picture leaves it at the top.
    middle = [h for p, h in zip(raw, heights, strict=True) if 540 < float(p.split(",")[0]) < 560]
    assert min(middle) < 0 < sorted(middle)[1]


def test_missing_log_fields(tmp_path, tiny_config):
    odd = [
        {"event": "step", "step": 51}, {"event": "step", "step": 52, "loss": "high"}, {"event": "sample", "step": 52},
        {"event": "step", "step": 53, "loss": 1.0, "tokens": None, "memory": 1e308}, {"event": "new kind"},
        {"event": "validation", "step": 53, "loss": 10**400}, {"event": "paused", "step": 53, "reason": ["a"]},
        {"event": "resumed", "step": 53, "seconds": "long"}, {"event": "started", "parameters": {}},
        *({"event": "resumed", "step": 3, "seconds": seconds} for seconds in (math.inf, math.nan, 10**400)),
    ]  # fmt: skip
    run = make_run(tmp_path / "run", tiny_config, entries=odd)
    (run / "data/manifest.json").write_text("[]")
    Page(written(tmp_path, run))
    (run / "log.jsonl").unlink()
    page = Page(written(tmp_path, run))
    assert "not finished" in page.texts["td"] and not page.all("polyline")


def test_validation_before_the_first_step(tmp_path, tiny_config):
    first = {"event": "validation", "step": 0, "loss": 6.0, "bits_per_byte": 2.0}
    run = read_run(make_run(tmp_path / "run", tiny_config, entries=[first]))
    assert run.x_at_step("tokens", 0) == run.x_at_step("seconds", 0) == 0
    del run.steps["step"][:3]  # as of a log that lacks its first lines
    assert math.isnan(run.x_at_step("tokens", 2))


def test_state_is_the_last_end_event_despite_later_warnings(tmp_path, tiny_config):
    ends = [{"event": "finished", "step": 50}, {"event": "training_warning", "step": 50, "message": "no more"}]
    run = make_run(tmp_path / "run", tiny_config, entries=ends)
    assert read_run(run).state == "finished"
    with (run / "log.jsonl").open("a") as file:
        file.write(json.dumps({"event": "started", "step": 50}) + "\n")
    assert read_run(run).state == "not finished"


def test_runs_with_the_same_name_get_unique_names(tmp_path, tiny_config):
    runs = [make_run(tmp_path / name, tiny_config) for name in ("a/run", "b/run", "b/x/run", "other")]
    page = Page(written(tmp_path, *runs))
    names = {a["data-name"] for a in page.all("polyline") if a.get("data-name", "").endswith("run")}
    assert names == {"a/run", "b/run", "x/run"}


def test_invalid_runs_and_outputs(tmp_path, tiny_config):
    with pytest.raises(CheckpointError, match="is not a run"):
        write_report([read_run(tmp_path)], tmp_path / "out.html", defaults)
    run = make_run(tmp_path / "run", tiny_config)
    (tmp_path / "mine.html").write_text("precious")
    with pytest.raises(CheckpointError, match="mine.html already exists and is not a report"):
        write_report([read_run(run)], tmp_path / "mine.html", defaults)
    assert (tmp_path / "mine.html").read_text() == "precious"
    for _ in range(2):  # a report replaces a report
        write_report([read_run(run)], tmp_path / "out.html", defaults)
    (run / "train.json").write_text("[1]")
    with pytest.raises(ConfigError, match="train.json is not a JSON object"):
        write_report([read_run(run)], tmp_path / "out.html", defaults)


def test_command(tmp_path, tiny_config, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    run = make_run(tmp_path / "run", tiny_config)
    assert _run(["report", str(run), "--open"]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n" and shown == [(run / "report.html").as_uri()]
    assert _run(["report", str(run), str(run)]) == 2
    assert "--out" in capsys.readouterr().err
    assert _run(["report", str(run), str(run), "--out", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").exists() and len(shown) == 1


def test_single_validation_is_a_label_or_a_sentence(tmp_path, tiny_config):
    html = written(tmp_path, make_run(tmp_path / "run", tiny_config, steps=10))
    page = Page(html)
    loss = 5 / math.sqrt(10) + 0.1
    assert f"validation {loss - 0.1:.4g}" in page.texts["text"]
    assert f"run: {loss / 3:.4g} at 1k tokens (a single value)" in page.texts["p"]
    assert f"run: {loss / 3:.4g} at 5s of steps (a single value)" in page.texts["p"]
    [validation] = [f for f in html.split("<figure") if "bits per byte)" in f]
    assert "<svg" not in validation
    several = Page(written(tmp_path, make_run(tmp_path / "more", tiny_config)))
    assert not any("one value" in text for text in several.texts["p"])
    assert not any(text.startswith("validation ") for text in several.texts["text"])


def test_load_of_experts_is_drawn_for_mixtures_only(tmp_path, tiny_config):
    validations = [{"event": "validation", "step": 10 * i, "loss": 2.0, "expert_load": 1 + i / 4} for i in range(1, 5)]
    mixture = make_run(tmp_path / "mixture", tiny_config, entries=validations)
    title = "tokens of the busiest expert, relative to the mean"
    assert title not in written(tmp_path, make_run(tmp_path / "dense", tiny_config))
    [figure] = [f for f in written(tmp_path, mixture).split("<figure") if title in f]
    assert figure.count("<circle") == 2 * 4  # over tokens and over time


def test_page_renders_in_chromium(tmp_path, tiny_config):
    """No error in the console, nothing asked of the network, the title untouched, curves drawn, choice of axis."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here")
    run = make_run(tmp_path / "run", tiny_config)
    written(tmp_path, run)
    log = tmp_path / "net.json"
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0", f"--log-net-log={log}",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", (tmp_path / "out.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert "<title>run</title>" in done.stdout and 'class="cursor"' in done.stdout  # the script went to its end
    assert "example.com" not in log.read_text(errors="replace")
